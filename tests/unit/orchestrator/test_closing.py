"""The close of a query: every turn becomes ready or masked, once, after the last trajectory has ended."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from flexmarl.config import AlgorithmConfig
from flexmarl.core.events import GroupClosed, SamplesMasked
from flexmarl.core.ids import AgentName, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue
from flexmarl.core.records import (
    DispatchRecord,
    FinishReason,
    OutcomeRecord,
    TrajectoryFailure,
    TurnRow,
    VersionSpan,
)
from flexmarl.orchestrator.closing import NOT_IN_OUTCOME, StepCloser
from flexmarl.orchestrator.trajectories import EndedTrajectory
from flexmarl.scheduling import ReadySample
from flexmarl.testing.events import RecordingSink

pytestmark = pytest.mark.unit

RED, BLUE = PolicyName("red"), PolicyName("blue")
AGENTS = {AgentName("writer"): RED, AgentName("judge"): BLUE}


class InlineInbox:
    """Runs work at once; its handler waits for `finish`."""

    def __init__(self) -> None:
        self.pending: list[Any] = []

    def start(self, name: str, work: Coroutine[Any, Any, Any], then: Any) -> None:
        result = asyncio.run(work)
        self.pending.append(lambda: then(result))

    def finish(self) -> None:
        while self.pending:
            self.pending.pop(0)()


@dataclass
class RecordingStore:
    filled: dict[PolicyName, list[AdvantageValue]] = field(default_factory=dict)
    masked: list[tuple[PolicyName, list[SampleKey], str]] = field(default_factory=list)

    async def fill(self, policy: PolicyName, values: Sequence[AdvantageValue]) -> None:
        self.filled.setdefault(policy, []).extend(values)

    async def mask(self, policy: PolicyName, keys: Sequence[SampleKey], reason: str) -> None:
        self.masked.append((policy, list(keys), reason))


def row(agent: str, query: int, trajectory: int, *, turn: int = 0, is_cut: bool = False) -> TurnRow:
    return TurnRow(
        key=SampleKey(0, query, trajectory, AgentName(agent), 0, turn),
        attempt=0,
        policy=AGENTS[AgentName(agent)],
        policy_version=0,
        weights_version=0,
        prompt_tokens=(1, 2, 3),
        response_tokens=(4, 5),
        logprobs=(-1.0, -1.0),
        temperature=1.0,
        finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=2, policy_version=0),),
    )


def ended(
    query: int, trajectory: int, rows: Sequence[TurnRow], reward: float, *, abandoned: Sequence[TurnRow] = ()
) -> EndedTrajectory:
    key = TrajectoryKey(0, query, trajectory)
    outcome = OutcomeRecord(
        trajectory=key,
        attempt=0,
        rewards={each.key.agent: reward for each in rows},
        turns=tuple(sorted(each.key for each in rows)),
    )
    return EndedTrajectory(key=key, turns=(*rows, *abandoned), outcome=outcome, failure=None)


def failed(query: int, trajectory: int, rows: Sequence[TurnRow] = ()) -> EndedTrajectory:
    key = TrajectoryKey(0, query, trajectory)
    failure = TrajectoryFailure(trajectory=key, attempt=0, kind="timeout", message="")
    return EndedTrajectory(key=key, turns=tuple(rows), outcome=None, failure=failure)


class Lab:
    def __init__(self, *, num_queries: int = 1, num_trajectories: int = 2, **algorithm: Any) -> None:
        self.inbox = InlineInbox()
        self.store = RecordingStore()
        self.events = RecordingSink()
        self.ready: list[tuple[PolicyName, list[ReadySample]]] = []
        self.num_all_closed = 0
        config = AlgorithmConfig(advantage_scale="none", **algorithm)
        store: Any = self.store
        inbox: Any = self.inbox
        self.closer = StepCloser(
            DispatchRecord(
                step=0, policy_version=0, queries=tuple(range(num_queries)), num_trajectories=num_trajectories
            ),
            algorithms={RED: config, BLUE: config},
            agents=AGENTS,
            store=store,
            inbox=inbox,
            events=self.events,
            on_ready=lambda policy, samples: self.ready.append((policy, samples)),
            on_all_closed=self._all_closed,
        )

    def _all_closed(self) -> None:
        self.num_all_closed += 1

    def end(self, *trajectories: EndedTrajectory) -> None:
        for trajectory in trajectories:
            self.closer.ended(trajectory)
        self.inbox.finish()


def test_advantages_are_written_when_the_last_trajectory_has_ended() -> None:
    lab = Lab()
    lab.end(ended(0, 1, [row("writer", 0, 1), row("judge", 0, 1)], 3.0))
    assert (lab.ready, lab.store.filled, lab.events.records) == ([], {}, [])
    lab.end(ended(0, 0, [row("writer", 0, 0)], 1.0))
    assert [(value.key.trajectory, value.advantage, value.reward) for value in lab.store.filled[RED]] == [
        (0, -1.0, 1.0),
        (1, 1.0, 3.0),
    ]


def test_what_was_filled_is_what_is_ready_with_its_tokens() -> None:
    lab = Lab()
    lab.end(*(ended(0, n, [row("writer", 0, n), row("writer", 0, n, turn=1)], float(n)) for n in range(2)))
    ((policy, samples),) = lab.ready
    assert policy == RED
    assert [sample.key for sample in samples] == [value.key for value in lab.store.filled[RED]]
    assert {sample.num_tokens for sample in samples} == {5}
    assert lab.events.records == [GroupClosed(query=0, num_ready=4, num_masked=0)]


def test_nothing_is_ready_before_the_store_has_it() -> None:
    lab = Lab()
    for n in range(2):
        lab.closer.ended(ended(0, n, [row("writer", 0, n)], float(n)))
    assert lab.ready == []
    assert lab.num_all_closed == 0
    lab.inbox.finish()
    assert len(lab.ready) == 1
    assert lab.num_all_closed == 1


def test_groups_close_over_the_survivors() -> None:
    lab = Lab(num_trajectories=3)
    lab.end(
        failed(0, 1, [row("writer", 0, 1)]),
        ended(0, 0, [row("writer", 0, 0)], 1.0),
        ended(0, 2, [row("writer", 0, 2)], 2.0),
    )
    assert [(value.key.trajectory, value.advantage) for value in lab.store.filled[RED]] == [(0, -0.5), (2, 0.5)]
    assert lab.store.masked == []


def test_a_lone_survivor_and_truncated_turns_are_masked_with_their_reasons() -> None:
    lab = Lab(truncated="mask")
    lab.end(
        ended(0, 0, [row("writer", 0, 0), row("judge", 0, 0)], 1.0),
        ended(0, 1, [row("writer", 0, 1, is_cut=True)], 2.0),
    )
    judge, cut = row("judge", 0, 0).key, row("writer", 0, 1).key
    assert sorted(lab.store.masked) == sorted([(RED, [cut], "truncated"), (BLUE, [judge], "group_of_one")])
    assert lab.closer.num_masked == {("writer", "truncated"): 1, ("judge", "group_of_one"): 1}
    masked = [record for record in lab.events.records if isinstance(record, SamplesMasked)]
    assert {(record.agent, record.reason, record.keys) for record in masked} == {
        ("writer", "truncated", (cut,)),
        ("judge", "group_of_one", (judge,)),
    }
    assert lab.events.records[-1] == GroupClosed(query=0, num_ready=1, num_masked=2)


def test_turns_that_the_workflow_gave_up_are_counted_but_left_to_the_store() -> None:
    lab = Lab()
    given_up = row("writer", 0, 0, turn=7)
    lab.end(
        ended(0, 0, [row("writer", 0, 0)], 1.0, abandoned=[given_up]),
        ended(0, 1, [row("writer", 0, 1)], 2.0),
    )
    assert lab.store.masked == []  # record_outcome has masked it
    assert lab.closer.num_masked == {("writer", NOT_IN_OUTCOME): 1}
    assert given_up.key not in [value.key for value in lab.store.filled[RED]]
    assert lab.events.records[-1] == GroupClosed(query=0, num_ready=2, num_masked=1)


def test_a_query_of_failures_closes_empty() -> None:
    lab = Lab()
    lab.end(failed(0, 0), failed(0, 1))
    assert lab.events.records == [GroupClosed(query=0, num_ready=0, num_masked=0)]
    assert (lab.ready, lab.num_all_closed) == ([], 1)


def test_queries_close_by_themselves_and_the_step_once() -> None:
    lab = Lab(num_queries=3)
    for query in (2, 0, 1):
        assert lab.num_all_closed == 0
        lab.end(*(ended(query, n, [row("writer", query, n)], float(n)) for n in range(2)))
    assert [record.query for record in lab.events.records if isinstance(record, GroupClosed)] == [2, 0, 1]
    assert lab.num_all_closed == 1
