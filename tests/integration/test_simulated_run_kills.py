"""Whole runs under virtual time in which one worker is killed at one turn of the event loop: a full crash matrix.

Nothing can happen between two turns of the loop, so killing at each of them tries every moment at which a worker can
die: while it starts, between a command and its answer, between the answer and its record in the store, in an idle wait.
The nightly profile tries each turn; otherwise every `STRIDE`-th is tried, and which ones differ by worker.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import flexmarl
from flexmarl.api import train
from flexmarl.config import RuntimeConfig, parse_config
from flexmarl.core.events import MicroBatchLeased, RunEnded, StepCommitted
from flexmarl.core.ids import WorkerId
from flexmarl.core.messages import TrajectoryEnded, WorkerExited
from flexmarl.core.protocols import WorkerHandle, WorkerSpec
from flexmarl.runtime import simulated
from flexmarl.runtime.simulated import SimulatedRuntime, VirtualTimeLoop
from flexmarl.telemetry import read_events

pytestmark = pytest.mark.integration

T = TypeVar("T")

NUM_STEPS = 2
STRIDE = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 23
WORKERS = ["trainer-small", "trainer-large", "instance-small-0", "instance-large-0", "episodes-0"]


def load_queries(*, split: str, num_queries: int | None, seed: int) -> list[dict[str, Any]]:
    """A data source."""
    return [{"text": f"{split} {number}"} for number in range(4)]


@flexmarl.workflow
async def write_and_judge(episode: flexmarl.Episode) -> dict[str, float]:
    """Two agents in turn."""
    draft = await episode.agent("writer").chat(episode.query["text"])
    verdict = await episode.agent("judge").chat(draft.text)
    return {"writer": float(len(draft.text)), "judge": float(len(verdict.text) + len(draft.text))}


class TurnLoop(VirtualTimeLoop):
    """Calls `on_turn` with the number of each turn of the loop."""

    def __init__(self, on_turn: Callable[[int], None]) -> None:
        super().__init__()
        self._on_turn = on_turn
        self.num_turns = 0

    def _run_once(self) -> None:
        self.num_turns += 1
        self._on_turn(self.num_turns)
        super()._run_once()  # type: ignore[misc]


class Killer:
    """Takes the place of `run_virtual` and kills the newest worker of a name at a turn of the loop."""

    def __init__(self, name: str, turn: int) -> None:
        self._name = name
        self._turn = turn
        self._victim: WorkerHandle | None = None
        self.num_turns = 0

    def run(self, main: Callable[[SimulatedRuntime], Awaitable[T]], config: RuntimeConfig | None = None) -> T:
        killer = self

        class Runtime(SimulatedRuntime):
            def start(self, spec: WorkerSpec, on_fact: Callable[[WorkerId, object], None]) -> Any:
                worker = super().start(spec, on_fact)
                if spec.worker_id.startswith(f"{killer._name}."):
                    killer._victim = worker
                return worker

        async def run() -> T:
            runtime = Runtime(RuntimeConfig(kind="simulated"))
            try:
                return await main(runtime)
            finally:
                await runtime.close()

        with asyncio.Runner(loop_factory=lambda: TurnLoop(self._look)) as runner:
            return runner.run(run())

    def _look(self, turn: int) -> None:
        self.num_turns = turn
        if turn == self._turn and self._victim is not None:
            self._victim.kill()


class RunOutcome:
    """What must not depend on a kill."""

    def __init__(self, events_path: Path, summary: Any) -> None:
        records = [event.record for event in read_events(events_path)]
        leases = {record.micro_batch_id: record for record in records if isinstance(record, MicroBatchLeased)}
        commits = [record.commit for record in records if isinstance(record, StepCommitted)]
        self.exits = [record for record in records if isinstance(record, WorkerExited)]
        self.digests = {name: policy["weights_digest"]["after"] for name, policy in summary["policies"].items()}
        self.versions = [commit.policy_version for commit in commits]
        self.trained = [
            (commit.step, policy, sorted(key for name in part.micro_batches for key in leases[name].keys))
            for commit in commits
            for policy, part in sorted(commit.policies.items())
        ]
        self.counts = [part.denominators for commit in commits for _, part in sorted(commit.policies.items())]
        self.ended = sorted(str(record.outcome.trajectory) for record in records if isinstance(record, TrajectoryEnded))
        self.last = records[-1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunOutcome, int]]:
    numbers = iter(range(10_000))

    def run(num_slots: int | None, name: str = "", turn: int = 0) -> tuple[RunOutcome, int]:
        folder = tmp_path / str(next(numbers))
        killer = Killer(name, turn)
        monkeypatch.setattr(simulated, "run_virtual", killer.run)
        result = train(parse_config(settings(folder, num_slots)))
        return RunOutcome(folder / "events.jsonl", result.summary), killer.num_turns

    return run


def settings(folder: Path, num_slots: int | None) -> dict[str, Any]:
    return {
        "run": {"name": "kills", "dir": str(folder)},
        "data": {"source": f"{__name__}:load_queries"},
        "workflow": {"path": f"{__name__}:write_and_judge"},
        "policies": {"small": {"model": "none"}, "large": {"model": "none"}},
        "agents": {"writer": {"policy": "small"}, "judge": {"policy": "large"}},
        "algorithm": {"truncated": "train"},
        "pipeline": {"num_steps": NUM_STEPS, "queries_per_step": 2, "trajectories_per_query": 2},
        "rollout": {"backend": {"kind": "scripted", "token_s": 0.01}, "max_new_tokens": 12},
        "training": {
            "backend": {"kind": "scripted", "token_s": 0.003, "update_s": 0.05, "num_parameters": 4},
            "micro_batch_tokens": 1,
            "seal_every": 2,
            "num_slots": num_slots,
        },
        "eval": {"at_ends": False},
        "store": {"kind": "memory"},
        "runtime": {"kind": "simulated"},
    }


@pytest.mark.parametrize("num_slots", [None, 1])
@pytest.mark.parametrize("worker", WORKERS)
def test_g2_g4_a_kill_at_any_turn_changes_no_sample_and_no_weight(
    run: Callable[..., tuple[RunOutcome, int]], worker: str, num_slots: int | None
) -> None:
    undisturbed, num_turns = run(num_slots)
    assert undisturbed.versions == [1, 2]
    num_killed = 0
    first = WORKERS.index(worker) * 2 % STRIDE
    for turn in range(first, num_turns, STRIDE):
        found, _ = run(num_slots, worker, turn)
        where = f"{worker} killed at turn {turn} of {num_turns}, training.num_slots={num_slots}"
        num_killed += any(record.reason == "signal SIGKILL" for record in found.exits)
        assert found.versions == undisturbed.versions, where
        assert found.trained == undisturbed.trained, where
        assert found.counts == undisturbed.counts, where
        assert found.digests == undisturbed.digests, where
        assert found.ended == undisturbed.ended, where
        assert found.last == RunEnded(policy_version=NUM_STEPS, reason="finished"), where
    assert num_killed > num_turns / STRIDE / 4  # at the other turns it was not running
