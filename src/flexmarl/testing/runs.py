"""Real runs in tests: the command line in a process of its own, its workers, and what it has trained.

Each `RunLab` has a registry of its own (TMPDIR), so that its runs and those of others do not see each other.
"""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flexmarl.core.events import EvaluationDone, RequestDispatched, RunStarted
from flexmarl.core.ids import PolicyName, Purpose, SampleKey
from flexmarl.core.records import CommitRecord
from flexmarl.models import ScriptedTokenizer
from flexmarl.objects import list_run_folders
from flexmarl.runtime.local.process_control import MARK_VARIABLE, start_time_ticks
from flexmarl.store import SqliteStore
from flexmarl.store.schema import decode_record
from flexmarl.telemetry.event_log import read_events
from flexmarl.telemetry.metrics_log import read_metrics

T = TypeVar("T")

FLEXMARL = (sys.executable, "-m", "flexmarl.cli")


def scripted_config() -> dict[str, Any]:
    """Return the configuration of a small run without a model: two policies, 4 steps of 3 queries x 3 trajectories.

    Turns end at different times; micro-batches are small, so that a step has several per policy.
    """
    return {
        "run": {"name": "scripted"},
        "data": {"source": "flexmarl.testing.teams:load_queries"},
        "workflow": {"path": "flexmarl.testing.teams:pair", "dry_run": False},
        "policies": {"wr": {"model": "none"}, "ju": {"model": "none"}},
        "agents": {"writer": {"policy": "wr"}, "judge": {"policy": "ju"}},
        "algorithm": {"truncated": "train"},
        "pipeline": {"num_steps": 4, "queries_per_step": 3, "trajectories_per_query": 3},
        "rollout": {"backend": {"kind": "scripted", "token_s": 0.002}, "max_new_tokens": 24},
        "training": {"backend": {"kind": "scripted", "token_s": 0.0002}, "micro_batch_tokens": 80, "seal_every": 2},
        "checkpoint": {"every": 2},
        "eval": {"at_ends": False},
    }


def write_scripted_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a tiny Llama that knows every token of scripted rollouts, as a model folder, and return the folder."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab_size = ScriptedTokenizer().vocab_size
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocab_size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """What a committed step has done."""

    weights_digests: Mapping[PolicyName, str]
    keys: Mapping[PolicyName, tuple[SampleKey, ...]]


def trained_steps(run_dir: Path) -> dict[int, TrainedStep]:
    """Return the committed steps in the store of a run that has ended."""
    with closing(_open_index(run_dir)) as connection:
        rows = connection.execute("SELECT record FROM commits ORDER BY step").fetchall()
    commits = [decode_record(CommitRecord, text) for (text,) in rows]
    return asyncio.run(_trained_steps(run_dir, commits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run has trained."""

    steps: dict[int, TrainedStep]
    metrics: list[dict[str, Any]]
    """Of each step, without those of time."""
    evaluations: dict[int, Mapping[str, float]]
    """Metrics of the last evaluation of each policy_version."""


def trained(run_dir: Path) -> Trained:
    """Return what a run that has ended has trained."""
    rows = [
        {name: value for name, value in row.items() if not name.endswith(("_s", "num_failed"))}
        for row in read_metrics(run_dir / "metrics.jsonl")
    ]
    evaluations = {record.policy_version: record.metrics for record in records_of(run_dir, EvaluationDone)}
    return Trained(steps=trained_steps(run_dir), metrics=rows, evaluations=evaluations)


def records_of(run_dir: Path, kind: type[T]) -> list[T]:
    """Return the records of a class in the event log."""
    return [event.record for event in read_events(run_dir / "events.jsonl") if isinstance(event.record, kind)]


async def _trained_steps(run_dir: Path, commits: Sequence[CommitRecord]) -> dict[int, TrainedStep]:
    store = await SqliteStore.open(run_dir / "store", call_inline)
    try:
        return {
            commit.step: TrainedStep(
                weights_digests={policy: entry.weights_digest for policy, entry in commit.policies.items()},
                keys={policy: tuple(keys) for policy, keys in (await store.trained_ids(commit.step)).items()},
            )
            for commit in commits
        }
    finally:
        await store.close()


async def call_inline(function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
    """Run a store's blocking work at once: `Runtime.call` for tools."""
    return function(*args)


def lease_ids(run_dir: Path, condition: str) -> list[int | None]:
    """Return the lease of each row of a run, which may be live, that fulfils a condition in SQL."""
    if not (run_dir / "store" / "index.db").exists():
        return []
    try:
        with closing(_open_index(run_dir)) as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type='table' AND name GLOB 'rows_*'")
            selects = [f'SELECT lease_id FROM "{name}" WHERE {condition}' for (name,) in names.fetchall()]
            return [lease_id for select in selects for (lease_id,) in connection.execute(select)]
    except sqlite3.OperationalError:  # the run is just making it
        return []


def recorded_turns(run_dir: Path) -> set[str]:
    """Return the keys of the turns that the store of a run that has ended holds, without superseded ones."""
    with closing(_open_index(run_dir)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type='table' AND name GLOB 'rows_*'")
        columns = "step, query, trajectory, agent, branch, turn"
        return {
            str(SampleKey(*key))
            for (name,) in names.fetchall()
            for key in connection.execute(f"SELECT {columns} FROM \"{name}\" WHERE status <> 'superseded'")
        }


def staleness(run_dir: Path) -> set[int]:
    """Return the differences between the step of a turn and the version that generated it, over committed turns."""
    with closing(_open_index(run_dir)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type='table' AND name GLOB 'rows_*'")
        select = "SELECT DISTINCT step - policy_version FROM \"{}\" WHERE status = 'committed'"
        return {number for (name,) in names.fetchall() for (number,) in connection.execute(select.format(name))}


def generated_turns(run_dir: Path) -> set[str]:
    """Return the keys of the training turns that instances were asked for since the last start of a run."""
    found: set[str] = set()
    for event in read_events(run_dir / "events.jsonl"):
        if isinstance(event.record, RunStarted):
            found = set()
        elif isinstance(event.record, RequestDispatched):
            purpose, _, key = event.record.request_id.rpartition("/")[0].partition("/")
            found |= {key} if purpose == Purpose.TRAIN else set()
    return found


def _open_index(run_dir: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{run_dir}/store/index.db?mode=ro", uri=True)


def wait_until(is_true: Callable[[], T | None], what: str, *, timeout_s: float = 60.0) -> T:
    """Return the first true value of `is_true()`; fail after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := is_true()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.005)
    return value


class LiveRun:
    """A command that runs in a process of its own. Use as a context: its end kills what is left."""

    def __init__(self, process: subprocess.Popen[str], registry: Path, output: Path) -> None:
        """Take over a started process; `RunLab.start` makes one."""
        self.process = process
        self._registry = registry
        self._output = output
        self._mark: str | None = None

    def mark(self) -> str:
        """Wait until the run has a runtime; return the mark of its processes."""
        return wait_until(self._look_for_mark, f"a runtime of pid {self.process.pid}\n{self.output()}")

    def _look_for_mark(self) -> str | None:
        if self._mark is None:
            self._mark = next((path.stem for path in self._records()), None)
        if self._mark is None and self.process.poll() is not None:
            raise AssertionError(f"the run ended with exit code {self.process.returncode}\n{self.output()}")
        return self._mark

    def _records(self) -> list[Path]:
        paths = self._registry.glob("flexmarl-*/*.json")
        return [path for path in paths if f'"pid": {self.process.pid},' in _read_if_there(path)]

    def worker_pid(self, name: str) -> int:
        """Wait until a worker whose name begins so (`instance-wr`, `trainer-wr`, `fork_server`) runs; return its id."""
        self.mark()
        start = f"fm:{name}"
        return wait_until(
            lambda: next((pid for found, pid in self.workers().items() if found.startswith(start)), None),
            f"worker {name} among {self.workers()}\n{self.output()}",
        )

    def workers(self) -> dict[str, int]:
        """Return the ids of the run's live worker processes by their names, which the kernel cuts at 15 bytes."""
        return {_comm(pid): pid for pid in _marked(self.mark())}

    def output(self) -> str:
        """Return what the command has printed so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float = 90.0) -> int:
        """Wait for the end; return the exit code, negative for a signal."""

        def has_ended() -> bool:
            if self._mark is None:  # taken note of while there is a record of it
                self._mark = next((path.stem for path in self._records()), None)
            return self.process.poll() is not None

        wait_until(has_ended, f"an end of the command\n{self.output()}", timeout_s=timeout_s)
        return self.process.wait()

    def check_nothing_is_left(self, *, timeout_s: float = 10.0) -> None:
        """Fail unless, soon after its end, no process and no object folder of the run is left."""
        wait_until(lambda: not self.left(), f"an end of {self.left()}", timeout_s=timeout_s)

    def left(self) -> list[str]:
        """Return what there is of the run: processes, object folders, records."""
        processes = [] if self._mark is None else [f"{_comm(pid)} ({pid})" for pid in _marked(self._mark)]
        folders = [str(path) for path in list_run_folders() if f"-{self.process.pid}-" in path.name]
        return processes + folders + [str(path) for path in self._records()]

    def __enter__(self) -> "LiveRun":
        """Return the run itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the command; its workers end with it."""
        self.process.kill()
        self.process.wait()


class RunLab:
    """Starts commands in a folder of a test."""

    def __init__(self, folder: Path) -> None:
        """Work in `folder`."""
        self.folder = folder
        self._registry = folder / "registry"
        self._registry.mkdir()
        self._num_runs = 0

    def write_config(self, config: Mapping[str, Any], name: str = "run.yaml") -> Path:
        """Write a configuration and return its file."""
        path = self.folder / name
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    def start(
        self, *arguments: str | Path, command: Sequence[str] = FLEXMARL, preexec: Callable[[], None] | None = None
    ) -> LiveRun:
        """Start `flexmarl ARGUMENTS`; `preexec` is called in the new process before it."""
        self._num_runs += 1
        output = self.folder / f"output{self._num_runs}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=self.folder,
                env={**os.environ, "TMPDIR": str(self._registry)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
                preexec_fn=preexec,
            )
        return LiveRun(process, self._registry, output)

    def run(self, *arguments: str | Path, expect: int = 0, **options: Any) -> str:
        """Run `flexmarl ARGUMENTS` to its end; fail unless it exits with code `expect`. Returns what it printed."""
        with self.start(*arguments, **options) as run:
            code = run.wait(150.0)
            output = run.output()
            assert code == expect, f"exit code {code}, expected {expect}:\n{output}"
            run.check_nothing_is_left()
        return output


class GatedRun:
    """A live run in which the trajectories of one query wait until `open_gate`, after their first turn."""

    def __init__(
        self, lab: RunLab, config: Mapping[str, Any], *, gated_query: int = 5, gated_split: str = "train"
    ) -> None:
        """Start it, in the folder `run` of the lab."""
        self.lab = lab
        self.run_dir = lab.folder / "run"
        self._gate = lab.folder / "gate"
        options = {"gate": str(self._gate), "gated_query": gated_query, "gated_split": gated_split}
        config = {**config, "data": {**config["data"], "options": options}}
        self.live = lab.start("train", lab.write_config(config), "run.dir=run")

    def wait_for_mid_step(self) -> None:
        """Return when trajectories wait at the gate and rows of others are in a gradient cache."""
        self.wait_for_gate()
        wait_until(lambda: lease_ids(self.run_dir, "status='acknowledged'"), "acknowledged rows")

    def wait_for_gate(self) -> None:
        """Return when a trajectory waits at the gate."""
        waiting = self._gate.with_name(f"{self._gate.name}.waiting")
        wait_until(waiting.exists, "a trajectory at the gate", timeout_s=120.0)

    def open_gate(self) -> None:
        """Let the trajectories go on, also those of a resumed run."""
        self._gate.touch()


def _marked(mark: str) -> list[int]:
    needle = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and start_time_ticks(int(entry.name)) is not None:
            try:
                environment = Path(f"/proc/{entry.name}/environ").read_bytes()
            except OSError:  # ended, or not ours
                continue
            if needle in environment:
                found.append(int(entry.name))
    return found


def _comm(pid: int) -> str:
    return _read_if_there(Path(f"/proc/{pid}/comm")).strip()


def _read_if_there(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # it has just ended
        return ""
