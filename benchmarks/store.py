"""The experience store between processes: rows per second in and out, durable, beside TransferQueue.

A row is a turn of 256 token ids and 256 log-probs with a reward. One at a time it is a trajectory of its own; in
batches of 64 rows a trajectory has 4 turns, those of a team, or 1 (`short_`), the dearest case, since outcomes are
recorded per trajectory. The owner of the store, a producer and a consumer are a process each; the producer is done
before the consumer begins. Rows are made before the clock starts.

Put: `StoreClient.put_finished`, whose return means that the rows survive SIGKILL. In batches it is `put_finished_soon`,
which lets the producer pack the next rows meanwhile, with a wait for all of them at the end; `waiting_` waits for each
batch. Get: claim, read (every number is summed) and acknowledge per call, and one commit of all rows at the end, on
disk when it returns. A lease is acknowledged with the claim of the next; where puts do not wait, the next claim is sent
before the rows of the present one are read.

`--peer-python` names the interpreter of an environment with TransferQueue, which then does the same in turns with the
store, without durability, acknowledgement and commit (`peer_transfer_queue.py`).

Usage: .venv/bin/python benchmarks/store.py [--json] [--quick] [--peer-python PATH]
"""

import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from report import parser_of, spread_of, with_setting
from store_job import NUM_CONTENTS, NUM_VALUES, Side, serve, sum_of_last, values_of

from flexmarl.core.ids import AgentName, HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import (
    CommitRecord,
    Denominators,
    DispatchRecord,
    FinishedTrajectory,
    FinishReason,
    OutcomeRecord,
    PolicyCommit,
    TurnRow,
    VersionSpan,
)
from flexmarl.runtime.local.store_client import StoreClient
from flexmarl.runtime.local.store_service import StoreService
from flexmarl.store import PackedBatch, SqliteStore

HERE = Path(__file__).resolve().parent
AGENT = AgentName("agent")
POLICY = PolicyName("policy")
QUERY = 0
CLAIM_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How rows are put and got."""

    batch_size: int
    """Rows per call."""
    num_turns: int
    """Rows per trajectory."""
    is_waiting: bool
    """The producer waits for the rows of a call before it packs the next ones."""


SHAPES = {
    "": Shape(batch_size=1, num_turns=1, is_waiting=True),
    "batch_": Shape(batch_size=64, num_turns=4, is_waiting=False),
    "waiting_batch_": Shape(batch_size=64, num_turns=4, is_waiting=True),
    "short_batch_": Shape(batch_size=64, num_turns=1, is_waiting=False),
}
"""By the part of a metric's name."""
FOR_PEER = ("", "batch_")
"""The peer has no trajectories, and one way to put."""


# --- the processes ----------------------------------------------------------------------------------------------------


@cache
def content(number: int) -> tuple[tuple[int, ...], tuple[float, ...], float]:
    """Return what is in a row."""
    tokens, logprobs, reward = values_of(number)
    return tuple(tokens), tuple(logprobs), reward


def finished(step: int, trajectory: int, num_turns: int) -> FinishedTrajectory:
    """Return rows as a rollout hands them over."""
    turns = tuple(turn_of(step, trajectory, turn, trajectory * num_turns + turn) for turn in range(num_turns))
    reward = content(trajectory)[2]
    outcome = OutcomeRecord(
        trajectory=TrajectoryKey(step, QUERY, trajectory),
        attempt=0,
        rewards={AGENT: reward},
        turns=tuple(turn.key for turn in turns),
    )
    return FinishedTrajectory(outcome=outcome, turns=turns, advantages=(reward - 0.5,) * num_turns)


def turn_of(step: int, trajectory: int, turn: int, row: int) -> TurnRow:
    """Return a row."""
    tokens, logprobs, _ = content(row % NUM_CONTENTS)
    return TurnRow(
        key=SampleKey(step, QUERY, trajectory, AGENT, 0, turn),
        attempt=0,
        policy=POLICY,
        policy_version=step,
        weights_version=step,
        prompt_tokens=(),
        response_tokens=tokens,
        logprobs=logprobs,
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=NUM_VALUES, policy_version=step),),
    )


def put(client: StoreClient, order: Mapping[str, Any]) -> dict[str, Any]:
    """Put the rows of a step."""
    step, num_turns = order["step"], order["num_turns"]
    num_trajectories, size = order["num_rows"] // num_turns, order["batch_size"] // num_turns
    trajectories = [finished(step, number, num_turns) for number in range(num_trajectories)]
    client.open_step(
        DispatchRecord(
            step=step, min_version=step, max_version=step, queries=(QUERY,), num_trajectories=num_trajectories
        )
    )
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for first in range(0, num_trajectories, size):
        if order["is_waiting"]:
            client.put_finished(trajectories[first : first + size])
        else:
            client.put_finished_soon(trajectories[first : first + size])
    client.wait_for_puts()
    return {"wall_s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}


@dataclass(slots=True)
class Totals:
    """What a consumer has read: every number of every row."""

    sum_of_last: int = 0
    sum_of_tokens: int = 0
    sum_of_logprobs: float = 0.0

    def read(self, batch: PackedBatch) -> None:
        """Read rows."""
        for row in range(len(batch)):
            tokens = batch.response_tokens(row)
            self.sum_of_last += tokens[-1]
            self.sum_of_tokens += sum(tokens)
            self.sum_of_logprobs += sum(batch.logprobs(row))


def get(client: StoreClient, order: Mapping[str, Any]) -> dict[str, Any]:
    """Claim, read and acknowledge the rows of a step, then commit it."""
    step, num_rows, size = order["step"], order["num_rows"], order["batch_size"]
    micro_batches = [f"m{number}" for number in range(num_rows // size)]
    is_waiting = order["is_waiting"]
    totals = Totals()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    lease, sent = None, None
    for number, micro_batch_id in enumerate(micro_batches):
        claim = partial(client.send_claim, POLICY, step, max_rows=size, timeout_s=CLAIM_TIMEOUT_S)
        granted = client.receive_claim(sent or claim(micro_batch_id, acknowledging=lease))
        if granted is None:
            raise RuntimeError(f"step {step}: no row is ready, {num_rows} were put")
        is_ahead = not is_waiting and number + 1 < len(micro_batches)
        # One lease is read while the next is on its way; the one before both is acknowledged with it.
        sent = claim(micro_batches[number + 1], acknowledging=lease) if is_ahead else None
        if not is_waiting and not is_ahead and lease is not None:
            client.acknowledge(lease)
        lease = granted[0]
        totals.read(granted[1])
    if lease is not None:
        client.acknowledge(lease)
    client.commit(commit_of(step, num_rows, micro_batches))
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {"wall_s": wall_s, "cpu_s": cpu_s, **asdict(totals)}


def commit_of(step: int, num_rows: int, micro_batches: Sequence[str]) -> CommitRecord:
    """Return the record of a step that trained every row in one update."""
    part = PolicyCommit(
        weights_version=step + 1,
        weights_digest="",
        denominators=Denominators(num_samples=num_rows, num_tokens=num_rows * NUM_VALUES),
        micro_batches=tuple(micro_batches),
        update_sizes=(len(micro_batches),),
    )
    return CommitRecord(step=step, policy_version=step + 1, policies={POLICY: part})


async def own(folder: Path) -> None:
    """Own the store and lend it, until the standard input ends."""
    store = await SqliteStore.open(folder, None)
    service = await StoreService.open(store, folder)
    await asyncio.to_thread(serve, lambda order: {"cpu_s": time.process_time()})
    await service.close()
    await store.close()


def run_role(role: str, folder: Path) -> None:
    """Be one of the processes."""
    if role == "owner":
        asyncio.run(own(folder))
        return
    holder = HolderId("policy#0") if role == "consumer" else None
    with StoreClient(folder, holder=holder) as client:
        serve(lambda order: (put if role == "producer" else get)(client, order))


# --- the measurement --------------------------------------------------------------------------------------------------


def is_all_read(answer: Mapping[str, Any], num_rows: int) -> bool:
    """Return whether the sums of a consumer are those of the rows that were put."""
    rows = [content(row % NUM_CONTENTS) for row in range(num_rows)]
    sum_of_tokens = sum(sum(tokens) for tokens, _, _ in rows)
    sum_of_logprobs = sum(sum(logprobs) for _, logprobs, _ in rows)
    return answer["sum_of_tokens"] == sum_of_tokens and math.isclose(answer["sum_of_logprobs"], sum_of_logprobs)


class Bench:
    """All sides, started once."""

    def __init__(self, folder: Path, stack: ExitStack, *, peer_python: str | None) -> None:
        """Start the processes."""
        script = [sys.executable, __file__, "--role"]
        self._owner = stack.enter_context(Side([*script, "owner", str(folder)]))
        ours = {role: stack.enter_context(Side([*script, role, str(folder)])) for role in ("producer", "consumer")}
        self._sides = {"store": ours}
        if peer_python:
            peer = stack.enter_context(Side([peer_python, str(HERE / "peer_transfer_queue.py")]))
            self._sides["peer"] = {"producer": peer, "consumer": peer}
        self._step = 0
        self.cpu_us: dict[str, list[float]] = {}
        """CPU time of each process for a row, by metric and process."""

    def round(self, num_rows: Mapping[int, int]) -> dict[str, dict[str, float]]:
        """Return the rates of every side, one step per shape; `num_rows` are by batch size."""
        rates: dict[str, dict[str, float]] = {side: {} for side in self._sides}
        for name, shape in SHAPES.items():
            for side in self._sides:
                if side == "store" or name in FOR_PEER:
                    put_rate, get_rate = self._step_of(side, name, shape, num_rows[shape.batch_size])
                    rates[side] |= {f"put_{name}rows_per_s": put_rate, f"get_{name}rows_per_s": get_rate}
            self._step += 1
        return rates

    def _step_of(self, side: str, name: str, shape: Shape, num_rows: int) -> list[float]:
        """Put and get the rows of a step; return both rates."""
        rates = []
        for metric, role in (("put", "producer"), ("get", "consumer")):
            order = {"role": role, "step": self._step, "num_rows": num_rows, **asdict(shape)}
            before_s = self._owner.run({})["cpu_s"]
            answer = self._sides[side][role].run(order)
            rates.append(num_rows / answer["wall_s"])
            if side == "store":
                owner_s = self._owner.run({})["cpu_s"] - before_s
                for process, cpu_s in (("owner", owner_s), (role, answer["cpu_s"])):
                    self.cpu_us.setdefault(f"{metric}_{name}{process}", []).append(1e6 * cpu_s / num_rows)
        if answer["sum_of_last"] != sum_of_last(num_rows) or (side == "store" and not is_all_read(answer, num_rows)):
            raise RuntimeError(f"{side} did not give back the tokens that were put")
        return rates


def measure(*, is_quick: bool, peer_python: str | None) -> dict[str, Any]:
    """Return the result object; the first round warms up and does not count."""
    num_rows, repeats = ({1: 128, 64: 1024}, 3) if is_quick else ({1: 512, 64: 4096}, 7)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        bench = Bench(Path(name) / "store", stack, peer_python=peer_python)
        rounds = [bench.round(num_rows) for _ in range(repeats + 1)][1:]
        cpu_us = {name: spread_of(values[1:])["median"] for name, values in bench.cpu_us.items()}
    spread = {
        side: {metric: spread_of([each[side][metric] for each in rounds]) for metric in metrics}
        for side, metrics in rounds[0].items()
    }
    medians = {
        side: {metric: values["median"] for metric, values in metrics.items()} for side, metrics in spread.items()
    }
    figures: dict[str, Any] = {
        "benchmark": "store",
        "unit": "rows/s",
        **medians["store"],
        "cpu_us_per_row": cpu_us,
        "spread": spread,
    }
    if "peer" in medians:
        figures["peer"] = medians["peer"]
        figures["ratio_to_peer"] = {
            metric: spread_of([each["store"][metric] / each["peer"][metric] for each in rounds])["median"]
            for metric in medians["peer"]
        }
    config = {
        "num_rows": num_rows,
        "shapes": {name: asdict(shape) for name, shape in SHAPES.items()},
        "num_values": NUM_VALUES,
        "repeats": repeats,
    }
    return with_setting(figures, config, is_quick=is_quick)


def main() -> None:
    """Run the benchmark, or one of its processes."""
    parser = parser_of("Experience store between processes, beside TransferQueue.", quick="fewer rows and repeats")
    parser.add_argument("--peer-python", help="interpreter of an environment with TransferQueue==0.1.11")
    parser.add_argument("--role", nargs=2, metavar=("ROLE", "FOLDER"), help="be one process of the benchmark")
    arguments = parser.parse_args()
    if arguments.role:
        run_role(arguments.role[0], Path(arguments.role[1]))
        return
    result = measure(is_quick=arguments.quick, peer_python=arguments.peer_python)
    if arguments.json:
        print(json.dumps(result))
        return
    for side, rows in result["spread"].items():
        for metric, spread in rows.items():
            print(f"{side:6} {metric:20} {spread['median']:10.0f}  [{spread['min']:.0f}, {spread['max']:.0f}]")
    for name, cpu_us in result["cpu_us_per_row"].items():
        print(f"CPU    {name:20} {cpu_us:10.1f} us/row")


if __name__ == "__main__":
    main()
