"""The close of a query: every turn becomes ready or masked, once, after the last trajectory has ended."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from flexmarl.config import AlgorithmConfig
from flexmarl.core.events import GroupClosed, SamplesMasked
from flexmarl.core.ids import AgentName, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, StoredStep
from flexmarl.core.records import (
    NOT_IN_OUTCOME,
    DispatchRecord,
    FinishReason,
    OutcomeRecord,
    StepExtension,
    TokenColumn,
    TokenValues,
    TrajectoryFailure,
    TurnColumns,
    TurnRow,
    VersionSpan,
)
from flexmarl.orchestrator.closing import ClosingSeams, StepCloser
from flexmarl.orchestrator.trajectory_set import EndedTrajectory
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


@dataclass
class ScoreRequest:
    policy: PolicyName
    column: TokenColumn
    turns: list[TurnRow]
    on_done: Any


class Lab:
    def __init__(
        self, *, num_queries: int = 1, num_trajectories: int = 2, max_extensions: int = 0, **algorithm: Any
    ) -> None:
        self.inbox = InlineInbox()
        self.store = RecordingStore()
        self.events = RecordingSink()
        self.ready: list[tuple[PolicyName, list[ReadySample]]] = []
        self.num_all_closed = 0
        self.extensions: list[StepExtension] = []
        self.score_requests: list[ScoreRequest] = []
        config = AlgorithmConfig(**{"advantage_scale": "none", **algorithm})
        store: Any = self.store
        inbox: Any = self.inbox
        self.closer = StepCloser(
            DispatchRecord(
                step=0,
                min_version=0,
                max_version=0,
                queries=tuple(range(num_queries)),
                num_trajectories=num_trajectories,
            ),
            ClosingSeams(
                algorithms={RED: config, BLUE: config},
                agents=AGENTS,
                max_extensions=max_extensions,
                store=store,
                inbox=inbox,
                events=self.events,
                scorer=self,
                on_ready=lambda policy, samples: self.ready.append((policy, samples)),
                on_extend=self.extensions.append,
                on_changed=self._changed,
            ),
        )

    def _changed(self) -> None:
        self.num_all_closed += self.closer.is_closed

    def score(self, policy: PolicyName, column: TokenColumn, turns: Sequence[TurnRow], on_done: Any) -> None:
        self.score_requests.append(ScoreRequest(policy, column, list(turns), on_done))

    def answer(self, values: Mapping[int, tuple[float, ...]]) -> None:
        """Answer the oldest request with values by trajectory."""
        request = self.score_requests.pop(0)
        request.on_done(tuple(TokenValues(key=turn.key, values=values[turn.key.trajectory]) for turn in request.turns))
        self.inbox.finish()

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


# --- statistics that need more than the rewards of a group ------------------------------------------------------------


def advantages(lab: Lab) -> list[float]:
    return [value.advantage for value in lab.store.filled[RED]]


def test_a_batch_statistic_waits_for_the_whole_step() -> None:
    lab = Lab(num_queries=2, advantage_scale="batch_std")
    lab.end(*(ended(0, n, [row("writer", 0, n)], float(n)) for n in range(2)))
    assert (lab.store.filled, lab.ready, lab.num_all_closed) == ({}, [], 0)
    lab.end(*(ended(1, n, [row("writer", 1, n)], 3.0 * n) for n in range(2)))
    # centred: -0.5, 0.5, -1.5, 1.5; variance (n - 1): 5 / 3
    assert advantages(lab) == pytest.approx([each / (5 / 3) ** 0.5 for each in (-0.5, 0.5, -1.5, 1.5)], rel=1e-5)
    assert [len(samples) for _, samples in lab.ready] == [4]
    assert lab.num_all_closed == 1


def test_a_batch_of_equal_advantages_teaches_nothing() -> None:
    """What is masked stays in its group's mean, so that the advantages left can all be one number."""
    lab = Lab(advantage_scale="batch_std", truncated="mask")
    lab.end(*(ended(0, n, [row("writer", 0, n, is_cut=n == 0)], float(n > 0)) for n in range(2)))
    assert advantages(lab) == [0.0]


def test_a_column_weighs_the_advantage() -> None:
    lab = Lab(weight_column="trust")
    for n in range(2):
        each = ended(0, n, [row("writer", 0, n)], float(n))
        assert each.outcome is not None
        columns = (TurnColumns(key=each.turns[0].key, values={"trust": 2.0 + n}),)
        lab.end(replace(each, outcome=replace(each.outcome, turn_columns=columns)))
    assert advantages(lab) == [-0.5 * 2.0, 0.5 * 3.0]


def test_kl_in_the_loss_is_scored_before_a_sample_is_ready_and_only_for_what_trains() -> None:
    lab = Lab(kl_coef=0.1, truncated="mask", num_trajectories=3)
    lab.closer.allow_scoring()
    lab.end(*(ended(0, n, [row("writer", 0, n, is_cut=n == 2)], float(n)) for n in range(3)))
    (request,) = lab.score_requests
    assert (request.policy, request.column) == (RED, TokenColumn.REFERENCE_LOGPROBS)
    assert [turn.key.trajectory for turn in request.turns] == [0, 1]
    assert lab.ready == []
    lab.answer(dict.fromkeys(range(2), (-1.0, -2.0)))
    assert advantages(lab) == [-1.0, 0.0]
    assert len(lab.ready) == 1


def test_kl_in_the_reward_is_compared_within_the_group() -> None:
    lab = Lab(kl_coef=0.5, kl_in="reward")
    lab.closer.allow_scoring()
    lab.end(*(ended(0, n, [row("writer", 0, n)], float(n)) for n in range(2)))
    lab.answer({0: (-1.5, -1.0), 1: (-1.0, -4.0)})  # mu is -1, -1: KL estimates 0.5 and 3
    assert [value.reward for value in lab.store.filled[RED]] == [0.0 - 0.25, 1.0 - 1.5]
    assert lab.score_requests == []  # the column is there already


def test_scoring_waits_for_the_turn_of_the_step() -> None:
    lab = Lab(kl_coef=0.1)
    lab.end(*(ended(0, n, [row("writer", 0, n)], float(n)) for n in range(2)))
    assert lab.score_requests == []
    assert lab.closer.is_generated
    lab.closer.allow_scoring()
    assert len(lab.score_requests) == 1


def test_what_an_interrupted_run_has_scored_is_not_scored_again() -> None:
    lab = Lab(kl_coef=0.1)
    rows = [row("writer", 0, n) for n in range(2)]
    values = tuple(TokenValues(key=each.key, values=(-1.0, -2.0)) for each in rows)
    dispatch = DispatchRecord(step=0, min_version=0, max_version=0, queries=(0,), num_trajectories=2)
    scored = {RED: {TokenColumn.REFERENCE_LOGPROBS: values}}
    lab.closer.restore(StoredStep(dispatch=dispatch, extensions=(), trajectories=(), scored=scored))
    lab.end(*(ended(0, n, [each], float(n)) for n, each in enumerate(rows)))
    assert lab.score_requests == []
    assert len(lab.ready) == 1


# --- extensions -------------------------------------------------------------------------------------------------------


def test_a_group_that_teaches_nothing_is_extended_and_closes_as_one() -> None:
    lab = Lab(max_extensions=1)
    lab.end(*(ended(0, n, [row("writer", 0, n)], 1.0) for n in range(2)))
    assert lab.extensions == [StepExtension(step=0, query=0, first_trajectory=2, num_trajectories=2)]
    assert (lab.store.filled, lab.closer.is_generated) == ({}, False)
    lab.end(ended(0, 2, [row("writer", 0, 2)], 1.0), ended(0, 3, [row("writer", 0, 3)], 3.0))
    assert advantages(lab) == [-0.5, -0.5, -0.5, 1.5]
    assert lab.closer.is_generated


def test_a_group_is_extended_so_often_and_no_more() -> None:
    lab = Lab(max_extensions=1)
    lab.end(*(ended(0, n, [row("writer", 0, n)], 1.0) for n in range(4)))
    assert len(lab.extensions) == 1
    assert advantages(lab) == [0.0] * 4


def test_a_group_with_a_signal_is_not_extended_nor_is_one_of_failures() -> None:
    lab = Lab(num_queries=2, max_extensions=3)
    lab.end(*(ended(0, n, [row("writer", 0, n)], float(n)) for n in range(2)), failed(1, 0), failed(1, 1))
    assert lab.extensions == []
    assert lab.num_all_closed == 1


def test_recorded_extensions_are_expected_after_a_resume() -> None:
    lab = Lab(max_extensions=1)
    dispatch = DispatchRecord(step=0, min_version=0, max_version=0, queries=(0,), num_trajectories=2)
    extension = StepExtension(step=0, query=0, first_trajectory=2, num_trajectories=2)
    lab.closer.restore(StoredStep(dispatch=dispatch, extensions=(extension,), trajectories=(), scored={}))
    lab.end(*(ended(0, n, [row("writer", 0, n)], 1.0) for n in range(2)))
    assert (lab.extensions, lab.store.filled) == ([], {})
    lab.end(*(ended(0, n, [row("writer", 0, n)], 1.0) for n in range(2, 4)))
    assert (lab.extensions, len(advantages(lab))) == ([], 4)
