"""The commands over a stand-in for `flexmarl.api`: arguments, output, exit codes."""

import contextlib
import io
import logging
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import flexmarl
from flexmarl.cli.commands import _StderrHandler, app
from flexmarl.config import RootConfig
from flexmarl.core.errors import BackendError, ConfigError, InvariantError
from flexmarl.telemetry import EvaluationReport, PolicyQueue, ProgressListener, RunSummary, StepReport

pytestmark = pytest.mark.unit

FULL_DISK = (
    "error: [Errno 28] No space left on device: 'runs/r/x'; see to the file, the permission or the disk space, then go "
    "on with --resume\n"
)
CONFIG = """
data: {source: "tasks:load"}
workflow: {path: "team.py:play"}
policies: {p: {model: folder}}
agents: {a: {policy: p}}
pipeline: {num_steps: 2}
"""


@dataclass
class FakeApi:
    calls: list[tuple[RootConfig, dict[str, Any]]] = field(default_factory=list)
    error: BaseException | None = None
    stopped_by: str | None = None
    validation_error: BaseException | None = None

    def train(self, config: RootConfig, *, resume: bool, listener: ProgressListener) -> None:
        self.calls.append((config, {"resume": resume}))
        if self.error:
            raise self.error
        listener.on_start(2, "runs/r")
        for step, success_frac in enumerate((0.25, 0.75)):
            listener.on_rollout_progress(4, 8)
            listener.on_queue({"p": PolicyQueue(num_waiting=1, num_running=2, weights_version=step)})
            listener.on_step(
                StepReport(
                    step=step,
                    num_steps=2,
                    rewards={"a": 0.5},
                    success_frac=success_frac,
                    tokens_per_s=100,
                    num_samples=8,
                    weights_versions={"p": step + 1},
                    duration_s=1,
                    eta_s=None,
                )
            )
        listener.on_message("checkpoint written")
        listener.on_end(
            RunSummary(
                name="r", run_dir="runs/r", policy_version=2, num_steps=2, duration_s=2, stopped_by=self.stopped_by
            )
        )

    def evaluate(self, config: RootConfig, *, run_dir: Path | None, listener: ProgressListener) -> EvaluationReport:
        self.calls.append((config, {"run_dir": run_dir}))
        report = EvaluationReport(
            policy_version=0,
            success_frac=0.5,
            greedy_success_frac=None,
            rewards={"a": 0.5},
            num_queries=4,
            duration_s=1,
            error=str(self.error) if self.error else None,
        )
        listener.on_evaluation(report)
        return report

    def validate(self, config: RootConfig) -> types.SimpleNamespace:
        if self.validation_error:
            raise self.validation_error
        return types.SimpleNamespace(lines=["policies: p", "groups: (query, agent)"])


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "flexmarl.api", fake)
    monkeypatch.setattr(flexmarl, "api", fake, raising=False)
    return fake


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return str(path)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def test_train_shows_steps_curve_and_end(api: FakeApi, config_file: str) -> None:
    result = run("train", config_file, "run.seed=7", "pipeline.num_steps=4", "--resume")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "run folder runs/r, 2 steps"
    assert lines[1].startswith("step 1/2  success  25%  reward a 0.50  8 samples")
    assert "checkpoint written" in lines
    assert "team success per step" in lines
    assert lines[-1] == "done: 2 of 2 steps in 2.0 s; run folder runs/r"
    (config, arguments), *_ = api.calls
    assert (config.run.seed, config.pipeline.num_steps, arguments) == (7, 4, {"resume": True})


def test_quiet_prints_the_final_line_only(api: FakeApi, config_file: str) -> None:
    assert run("train", config_file, "--quiet").stdout == "done: 2 of 2 steps in 2.0 s; run folder runs/r\n"
    assert run("eval", config_file, "-q").stdout.splitlines() == [
        "evaluation at version 0: success 50%  reward a 0.50  (4 queries, 1.0 s)"
    ]


def test_a_stopped_run_exits_with_130(api: FakeApi, config_file: str) -> None:
    api.stopped_by = "SIGTERM"
    result = run("train", config_file)
    assert result.exit_code == 130
    assert "to go on: flexmarl train runs/r --resume" in result.stdout


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (ConfigError("run.dir is a file"), 2, "error: run.dir is a file\n"),
        (BackendError("an instance died"), 1, "error: an instance died\n"),
        (
            OSError(28, "No space left on device", "runs/r/x"),
            1,
            FULL_DISK,
        ),
        (KeyboardInterrupt(), 130, "aborted; what the last checkpoint holds can be resumed with --resume\n"),
    ],
)
def test_errors_are_one_message_and_a_code(
    api: FakeApi, config_file: str, error: BaseException, exit_code: int, message: str
) -> None:
    api.error = error
    result = run("train", config_file)
    assert (result.exit_code, result.stderr) == (exit_code, message)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(13, "Permission denied", "x"), "see to the file, the permission or the disk space, then try again\n"),
        (KeyboardInterrupt(), "aborted\n"),
    ],
)
def test_what_does_not_train_is_not_told_to_resume(
    api: FakeApi, config_file: str, error: BaseException, message: str
) -> None:
    api.validation_error = error
    result = run("validate", config_file)
    assert result.stderr.endswith(message)
    assert "--resume" not in result.stderr


def test_log_lines_go_to_what_stderr_is_at_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    handler = _StderrHandler()
    handler.emit(logging.LogRecord("n", logging.WARNING, "f", 1, "an instance died", (), None))
    with contextlib.redirect_stderr(io.StringIO()) as elsewhere:
        handler.emit(logging.LogRecord("n", logging.WARNING, "f", 1, "another", (), None))
    assert capsys.readouterr().err == "an instance died\n"
    assert elsewhere.getvalue() == "another\n"


def test_our_own_bugs_keep_their_traceback(api: FakeApi, config_file: str) -> None:
    api.error = InvariantError("two leases")
    result = run("train", config_file)
    assert result.exception is api.error
    assert "please report it" in result.stderr


def test_wrong_configuration_is_one_message_and_code_2(api: FakeApi, config_file: str, tmp_path: Path) -> None:
    for arguments, message in (
        ([config_file, "pipeline.num_step=3"], "did you mean num_steps?"),
        ([str(tmp_path / "none.yaml")], "cannot read the configuration"),
        ([str(tmp_path)], "so it is not a run"),
    ):
        for command in ("train", "eval", "validate"):
            result = run(command, *arguments)
            assert result.exit_code == 2
            assert message in result.stderr
            assert "Traceback" not in result.output
    assert api.calls == []


def test_a_run_folder_stands_for_its_configuration(api: FakeApi, tmp_path: Path) -> None:
    folder = tmp_path / "my: run"
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    assert run("train", str(folder), "--resume").exit_code == 0
    assert run("eval", str(folder), "eval.num_queries=4").exit_code == 0
    (trained, _), (evaluated, arguments) = api.calls
    assert trained.run.dir == str(folder)
    assert evaluated.eval.num_queries == 4
    assert arguments == {"run_dir": folder}


def test_a_failed_evaluation_exits_with_1(api: FakeApi, config_file: str) -> None:
    api.error = BackendError("timed out")
    result = run("eval", config_file)
    assert result.exit_code == 1
    assert "evaluation at version 0 failed: timed out" in result.stdout


def test_validate_prints_the_report(api: FakeApi, config_file: str) -> None:
    result = run("validate", config_file)
    assert (result.exit_code, result.stdout) == (0, "policies: p\ngroups: (query, agent)\n")


def test_version() -> None:
    assert run("--version").stdout == "flexmarl 0.1.0\n"
