"""How much of the possible overlap of rollout and training a strict step reaches, as phi.

    phi = (serial - strict) / (serial - bound), in seconds of a step, from its dispatch to its commit

A live strict run of the quick start team records every completion and when it came. Then serial and strict steps run in
turns on the same recording: instances sleep and answer at the recorded times (`rollout/backends/trace.py`), all else is
real: orchestrator, workflow, store, trainers, update, publication. So both sides wait for the same tokens at the same
moments and train the same samples, and they differ in nothing but when training starts.

`bound` is the least that an overlapped step can take, computed from each serial step: every group is released the
moment it closes, a policy trains its groups in that order without a pause, at the seconds per token that the serial
step needed, and the update, publication and commit of the serial step follow the policy that ends last. With all groups
released at the last closing the same formula gives the serial step itself.

Usage: .venv/bin/python benchmarks/overlap.py [--json] [--quick]
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

# Before torch is imported: its thread pools read it once.
os.environ["OMP_NUM_THREADS"] = "1"

from report import parser_of, spread_of, with_setting

import flexmarl
from flexmarl.config import load_config
from flexmarl.core.events import GroupClosed, RequestDispatched, StepCommitted, StepDispatched
from flexmarl.core.ids import PolicyName, RequestId, SampleKey
from flexmarl.core.messages import Generated, GradientAccumulated, TurnRequested, UpdateApplied
from flexmarl.rollout.backends.trace import RecordedTurn, write_trace
from flexmarl.store import SqliteStore
from flexmarl.telemetry import read_events, read_metrics

T = TypeVar("T")

QUICK_START = Path(__file__).resolve().parents[1] / "examples" / "quickstart.yaml"
TIME_LIMIT_S = 1080.0
"""No further repeat begins when it would end later than this."""
NUM_GROUPS = 16
"""Groups of each policy in a step."""
TRAJECTORIES_PER_QUERY = 16
TIME_STRETCH = 1.0
"""Recorded times are multiplied by this, so that training takes 0.5 to 1 times as long as generation."""
SETTING: tuple[str, ...] = (
    f"pipeline.queries_per_step={NUM_GROUPS}",
    f"pipeline.trajectories_per_query={TRAJECTORIES_PER_QUERY}",
    "rollout.inter_query=4",  # so that groups close one after the other, as they do with many queries
    "rollout.ignore_stop=true",  # turns of 24 tokens in place of 3, which would leave little but fixed costs
    "rollout.max_new_tokens=24",
    "algorithm.truncated=train",  # so that every turn is trained, and is found in the store
    "eval.at_ends=false",
    "checkpoint.every=1000",
    "store.retention=all",
    "telemetry.trajectories_per_step=0",
)

Tokens = dict[tuple[int, int], dict[PolicyName, int]]
"""Trained tokens, prompts included, by (step, query) and policy."""


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """One step as its run's events tell it; times in seconds since its dispatch."""

    step: int
    dispatched_s: float
    """On the clock of the run."""
    closed_s: dict[int, float] = field(default_factory=dict)
    """By query."""
    trained_s: dict[PolicyName, float] = field(default_factory=dict)
    """When the last micro-batch of each policy was in its gradient cache."""
    work_s: dict[PolicyName, float] = field(default_factory=dict)
    """Sum of what its process group says that forward and backward took."""
    num_micro_batches: dict[PolicyName, int] = field(default_factory=dict)
    update_s: float = 0.0
    """When the last policy had updated and published."""
    duration_s: float = 0.0

    @property
    def generated_s(self) -> float:
        """When the last group had closed."""
        return max(self.closed_s.values())


def step_times(events_path: Path) -> list[StepTimes]:
    """Return every committed step but the first."""
    steps: list[StepTimes] = []
    for event in read_events(events_path):
        record = event.record
        if isinstance(record, StepDispatched):
            steps.append(StepTimes(step=record.dispatch.step, dispatched_s=event.time_s))
        if not steps:
            continue
        current = steps[-1]
        now_s = event.time_s - current.dispatched_s
        match record:
            case GroupClosed():
                current.closed_s[record.query] = now_s
            case GradientAccumulated():
                policy = record.policy
                current.trained_s[policy] = now_s
                current.work_s[policy] = current.work_s.get(policy, 0.0) + record.duration_s
                current.num_micro_batches[policy] = current.num_micro_batches.get(policy, 0) + 1
            case UpdateApplied():
                current.update_s = now_s
            case StepCommitted():
                current.duration_s = now_s
            case _:
                pass
    return [step for step in steps if step.duration_s > 0][1:]


def bound_of(serial: StepTimes, tokens: Tokens) -> float:
    """Return the least duration of a step with the closings, speed and ending of `serial`, in seconds."""
    order = sorted(serial.closed_s, key=lambda query: serial.closed_s[query])
    ends_s = []
    for policy, trained_s in serial.trained_s.items():
        of_query = {query: tokens[serial.step, query].get(policy, 0) for query in order}
        token_s = (trained_s - serial.generated_s) / sum(of_query.values())
        end_s = 0.0
        for query in order:
            end_s = max(end_s, serial.closed_s[query]) + of_query[query] * token_s
        ends_s.append(end_s)
    return max(ends_s) + serial.duration_s - max(serial.trained_s.values())


# --- recording --------------------------------------------------------------------------------------------------------


async def _call_inline(function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
    return function(*args)


async def read_turns(run_dir: Path) -> list[RecordedTurn]:
    """Return every trained turn of a run that has ended: its tokens from the store, its time from the events."""
    times_s = answer_times(run_dir / "events.jsonl")
    store = await SqliteStore.open(run_dir / "store", _call_inline)
    turns = []
    try:
        for commit in await store.commits_after(0):
            for policy, entry in commit.policies.items():
                for micro_batch_id in entry.micro_batches:
                    samples = await store.micro_batch(policy, commit.step, micro_batch_id)
                    turns += [sample.turn for sample in samples]
    finally:
        await store.close()
    if missing := sorted(times_s.keys() - {turn.key for turn in turns}):
        raise RuntimeError(f"{len(missing)} turns of the live run were not trained, the first: {missing[0]}")
    return [
        RecordedTurn(
            key=turn.key,
            time_s=times_s[turn.key] * TIME_STRETCH,
            prompt_tokens=turn.prompt_tokens,
            tokens=turn.response_tokens,
            logprobs=turn.logprobs,
            finish_reason=turn.finish_reason,
        )
        for turn in turns
    ]


def answer_times(events_path: Path) -> dict[SampleKey, float]:
    """Return when each turn was answered, in seconds since the first request of its step at its instance."""
    keys: dict[RequestId, SampleKey] = {}
    starts_s: dict[tuple[int, str], float] = {}
    """By step and instance."""
    start_of: dict[RequestId, float] = {}
    times_s: dict[SampleKey, float] = {}
    for event in read_events(events_path):
        match event.record:
            case TurnRequested(request_id=request_id, key=key):
                keys[request_id] = key
            case RequestDispatched(request_id=request_id, instance_id=instance_id):
                start_of[request_id] = starts_s.setdefault((keys[request_id].step, instance_id), event.time_s)
            case Generated(completion=completion):
                request_id = completion.request_id
                times_s[keys[request_id]] = event.time_s - start_of[request_id]
            case _:
                pass
    return times_s


def tokens_of(turns: Sequence[RecordedTurn], policy_of: Mapping[str, PolicyName]) -> Tokens:
    """Return the tokens that each group brings to its policy."""
    tokens: Tokens = {}
    for turn in turns:
        of_group = tokens.setdefault((turn.key.step, turn.key.query), {})
        policy = policy_of[turn.key.agent]
        of_group[policy] = of_group.get(policy, 0) + len(turn.prompt_tokens) + len(turn.tokens)
    return tokens


# --- measuring --------------------------------------------------------------------------------------------------------


class Bench:
    """Runs of one job in a scratch folder."""

    def __init__(self, scratch: Path, *, num_steps: int) -> None:
        """Every run has `num_steps` steps, and one before them that is left out."""
        self._scratch = scratch
        self._num_steps = num_steps + 1
        self._num_runs = 0
        self._trace = scratch / "trace.jsonl"
        self.tokens: Tokens = {}

    def record(self) -> list[StepTimes]:
        """Run live and strict, and keep the recording for `replay`; return its steps."""
        run_dir = self._run()
        turns = asyncio.run(read_turns(run_dir))
        write_trace(self._trace, turns)
        agents = load_config(QUICK_START).agents
        self.tokens = tokens_of(turns, {name: PolicyName(agent.policy) for name, agent in agents.items()})
        return step_times(run_dir / "events.jsonl")

    def replay(self, mode: str) -> list[StepTimes]:
        """Run the recording in a pipeline mode; return its steps."""
        run_dir = self._run(
            f"pipeline.mode={mode}", "rollout.backend.kind=scripted", f"rollout.backend.trace={self._trace}"
        )
        steps = step_times(run_dir / "events.jsonl")
        for step in steps:
            if len(step.closed_s) != NUM_GROUPS:
                raise RuntimeError(f"{mode}: step {step.step} closed {len(step.closed_s)} groups, not {NUM_GROUPS}")
        return steps

    def _run(self, *setting: str) -> Path:
        self._num_runs += 1
        run_dir = self._scratch / f"run-{self._num_runs}"
        overrides = [f"run.dir={run_dir}", f"pipeline.num_steps={self._num_steps}", *SETTING, *setting]
        config = load_config(QUICK_START, overrides)
        result = flexmarl.train(config)
        if result.stopped_by is not None:
            # A run takes Ctrl-C as its own end; here it means the end of the benchmark.
            raise SystemExit(f"stopped by {result.stopped_by}")
        self._check(read_metrics(run_dir / "metrics.jsonl"), policies=list(config.policies))
        return run_dir

    def _check(self, rows: Sequence[Mapping[str, object]], *, policies: Sequence[str]) -> None:
        """Refuse a run that has not done the whole job: every turn of every step trained."""
        if len(rows) != self._num_steps:
            raise RuntimeError(f"{len(rows)} steps were committed, expected {self._num_steps}")
        expected = NUM_GROUPS * TRAJECTORIES_PER_QUERY
        for row in rows:
            for policy in policies:
                if (found := row.get(f"policy/{policy}/num_samples")) != expected:
                    raise RuntimeError(f"step {row['step']}: {policy} trained {found} samples, expected {expected}")


def median_of(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def measure_pair(bench: Bench, *, is_strict_first: bool) -> dict[str, float]:
    """Run serial and strict on the recording, one after the other; return medians over steps."""
    modes = ("strict", "serial") if is_strict_first else ("serial", "strict")
    runs = {mode: bench.replay(mode) for mode in modes}
    serial, strict = runs["serial"], runs["strict"]
    row = {
        "serial_s": median_of([step.duration_s for step in serial]),
        "strict_s": median_of([step.duration_s for step in strict]),
        "bound_s": median_of([bound_of(step, bench.tokens) for step in serial]),
        "train_generate_ratio": median_of(
            [(max(step.trained_s.values()) - step.generated_s) / step.generated_s for step in serial]
        ),
    }
    row["phi"] = phi_of(row)
    for mode, steps in runs.items():
        row |= {f"{mode}.{name}": value for name, value in parts_of(steps).items()}
    return row


def phi_of(row: Mapping[str, float]) -> float:
    """Return the share of the possible gain that strict reaches."""
    return (row["serial_s"] - row["strict_s"]) / (row["serial_s"] - row["bound_s"])


def parts_of(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Return where the time of a step goes, medians over steps."""
    return {
        "generation_s": median_of([step.generated_s for step in steps]),
        "training_after_s": median_of([max(step.trained_s.values()) - step.generated_s for step in steps]),
        "update_s": median_of([step.update_s - max(step.trained_s.values()) for step in steps]),
        "publish_and_commit_s": median_of([step.duration_s - step.update_s for step in steps]),
        "work_s": median_of([max(step.work_s.values()) for step in steps]),
        "num_micro_batches": median_of([max(step.num_micro_batches.values()) for step in steps]),
    }


def measure(bench: Bench, *, repeats: int, start_s: float) -> dict[str, Any]:
    """Record, then replay in turns; return the figures."""
    live = bench.record()
    tell(f"live strict: {median_of([step.duration_s for step in live]):.3f} s a step")
    rows: list[dict[str, float]] = []
    longest_s = 0.0
    while len(rows) < repeats and time.monotonic() - start_s + longest_s < TIME_LIMIT_S:
        row_start_s = time.monotonic()
        rows.append(measure_pair(bench, is_strict_first=len(rows) % 2 == 1))
        tell(", ".join(f"{name} {rows[-1][name]:.3f}" for name in ("serial_s", "strict_s", "bound_s", "phi")))
        longest_s = max(longest_s, time.monotonic() - row_start_s)
    spreads = {name: spread_of([row[name] for row in rows]) for name in rows[0]}
    figures = {name: spread["median"] for name, spread in spreads.items() if "." not in name}
    return {
        **figures,
        "phi": phi_of(figures),
        "possible_gain_frac": (figures["serial_s"] - figures["bound_s"]) / figures["serial_s"],
        "live_strict_s": median_of([step.duration_s for step in live]),
        "num_groups": NUM_GROUPS,
        **{
            mode: {
                name.partition(".")[2]: spread["median"]
                for name, spread in spreads.items()
                if name.startswith(f"{mode}.")
            }
            for mode in ("serial", "strict")
        },
        "live": parts_of(live),
        "spreads": spreads,
        "repeats": len(rows),
    }


def tell(line: str) -> None:
    """Print progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


def print_text(result: Mapping[str, Any]) -> None:
    """Print the result for people."""
    for name, spread in result["spreads"].items():
        print(f"{name:32} {spread['median']:8.3f}  [{spread['min']:.3f}, {spread['max']:.3f}]")
    for name in ("possible_gain_frac", "live_strict_s"):
        print(f"{name:32} {result[name]:8.3f}")


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(
        "The share of the possible overlap of rollout and training that a strict step reaches.",
        quick="one repeat of one step",
    )
    parser.add_argument("--repeats", type=int, default=7, help="of serial and strict, in turns")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    arguments = parser.parse_args()
    start_s = time.monotonic()
    num_steps, repeats = (1, 1) if arguments.quick else (arguments.steps, arguments.repeats)
    config = {"num_steps": num_steps, "setting": list(SETTING), "time_stretch": TIME_STRETCH}
    with tempfile.TemporaryDirectory(prefix="flexmarl-overlap-") as scratch:
        figures = measure(Bench(Path(scratch), num_steps=num_steps), repeats=repeats, start_s=start_s)
    figures = {"benchmark": "overlap", "unit": "s", **figures}
    result = with_setting(figures, config, is_quick=arguments.quick)
    if arguments.json:
        print(json.dumps(result))
    else:
        print_text(result)


if __name__ == "__main__":
    main()
