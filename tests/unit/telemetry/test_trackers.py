"""Experiment trackers over stand-ins for their packages, and over the real TensorBoard when it is installed."""

import importlib
import logging
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.errors import ConfigError
from flexmarl.telemetry import TrackerGroup, check_trackers, open_trackers

pytestmark = pytest.mark.unit

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass
class Recorder:
    """A tracker that remembers what it was told, and fails from its `fails_at`-th call on."""

    fails_at: int = 1000
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    num_calls: int = 0
    is_closed: bool = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call()
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self._call()
        self.is_closed = True

    def _call(self) -> None:
        self.num_calls += 1
        if self.num_calls >= self.fails_at:
            raise ConnectionError("the server is gone")


def test_numbers_reach_every_tracker_and_text_none() -> None:
    first, second = Recorder(), Recorder()
    group = TrackerGroup({"a": first, "b": second})
    group.log(
        3, {"agent/writer/reward": 0.5, "policy/wr/weights_version": 4, "rollout/note": "x", "eval/success": None}
    )
    group.close()
    assert first.rows == second.rows == [(3, {"agent/writer/reward": 0.5, "policy/wr/weights_version": 4.0})]
    assert first.is_closed
    assert second.is_closed


def test_a_tracker_that_fails_is_named_once_and_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Recorder(fails_at=2), Recorder()
    group = TrackerGroup({"broken": broken, "whole": whole})
    with caplog.at_level(logging.ERROR):
        for step in range(4):
            group.log(step, {"x": float(step)})
        group.close()
    assert [record.getMessage() for record in caplog.records] == ["tracker broken failed and is not used any more"]
    assert broken.num_calls == 2
    assert [step for step, _ in whole.rows] == [0, 1, 2, 3]
    assert whole.is_closed


def test_a_tracker_that_fails_to_close_does_not_keep_others_open() -> None:
    broken, whole = Recorder(fails_at=1), Recorder()
    TrackerGroup({"broken": broken, "whole": whole}).close()
    assert whole.is_closed


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("nothing_installed")
def test_g10_a_package_that_is_missing_names_the_extra(name: str, tmp_path: Path) -> None:
    for look in (
        lambda: check_trackers([name]),
        lambda: open_trackers([name], run_dir=tmp_path, run_name="r", config={}),
    ):
        with pytest.raises(ConfigError) as caught:
            look()
        assert f"telemetry.trackers has '{name}', whose package is not installed" in str(caught.value)
        assert f"pip install 'flexmarl[{name}]'" in str(caught.value)


@dataclass
class FakePackage:
    """Stands for wandb, mlflow and trackio at once, and notes every call."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def module(self, name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        for function in ("init", "log", "finish", "start_run", "end_run", "log_metrics", "set_experiment"):
            setattr(module, function, self.note(function))
        module.set_tracking_uri = self.note("set_tracking_uri")  # type: ignore[attr-defined]
        return module

    def note(self, function: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((function, args, kwargs))
            return self.module("run")

        return call

    def arguments(self, function: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for name, args, kwargs in self.calls if name == function]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    fake = FakePackage()
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, fake.module(name))
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")  # restored by pytest, unlike one that the tracker sets itself
    return fake


def log_one_row(name: str, folder: Path) -> None:
    check_trackers([name])
    group = open_trackers([name], run_dir=folder, run_name="r7", config={"run": {"seed": 1}})
    group.log(5, {"agent/writer/reward": 0.25})
    group.close()


def test_wandb_is_offline_unless_told(package: FakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_one_row("wandb", tmp_path)
    monkeypatch.setenv("WANDB_MODE", "online")
    log_one_row("wandb", tmp_path)
    offline, online = (kwargs for _, kwargs in package.arguments("init"))
    assert (offline["mode"], offline["dir"], offline["name"]) == ("offline", str(tmp_path), "r7")
    assert offline["config"] == {"run": {"seed": 1}}
    assert online["mode"] == "online"
    assert package.arguments("log")[0] == (({"agent/writer/reward": 0.25},), {"step": 5})
    assert len(package.arguments("finish")) == 2


def test_mlflow_writes_into_the_run_folder_unless_told(
    package: FakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_one_row("mlflow", tmp_path)
    assert package.arguments("set_tracking_uri") == [((f"sqlite:///{tmp_path}/mlflow.db",), {})]
    assert package.arguments("log_metrics") == [(({"agent/writer/reward": 0.25},), {"step": 5})]
    assert len(package.arguments("end_run")) == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    log_one_row("mlflow", tmp_path)
    assert len(package.arguments("set_tracking_uri")) == 1


def test_trackio_gets_rows_and_an_end(package: FakePackage, tmp_path: Path) -> None:
    log_one_row("trackio", tmp_path)
    assert package.arguments("log") == [(({"agent/writer/reward": 0.25},), {"step": 5})]
    assert len(package.arguments("finish")) == 1


def test_a_tracker_that_does_not_start_is_named_and_the_others_are_closed(
    package: FakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError("log in first")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigError, match=r"has 'wandb', which does not start: PermissionError\('log in first'\)"):
        open_trackers(["mlflow", "wandb"], run_dir=tmp_path, run_name="r", config={})
    assert len(package.arguments("end_run")) == 1


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    accumulators = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    group = open_trackers(["tensorboard"], run_dir=tmp_path, run_name="r", config={})
    for step in range(3):
        group.log(step, {"agent/writer/reward": step / 4})
    group.close()
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("agent/writer/reward")]
    assert found == [(0, 0.0), (1, 0.25), (2, 0.5)]
