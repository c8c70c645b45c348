"""Closes the queries of a step: when its last trajectory has ended, groups are final and advantages are written.

    ended -> (extended: nothing can be learned from it yet) -> scored -> judged -> written -> ready

Scoring is the work of the training engine, which works on one step at a time: until it is this step's turn, queries
whose algorithm needs scored columns wait.

Invariant: every turn of the step becomes ready, masked with a reason, failed or superseded; none is left open.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from flexmarl.algorithms import (
    QueryClosing,
    TurnFacts,
    close_query,
    has_signal,
    kl_penalty,
    scale_by_batch,
    token_columns,
)
from flexmarl.config import AlgorithmConfig
from flexmarl.core.events import GroupClosed, SamplesMasked
from flexmarl.core.ids import AgentName, PolicyName, SampleKey
from flexmarl.core.protocols import AdvantageValue, EventSink, ExperienceStore, Inbox, StoredStep
from flexmarl.core.records import (
    NOT_IN_OUTCOME,
    DispatchRecord,
    OutcomeRecord,
    StepExtension,
    TokenColumn,
    TokenValues,
    TurnRow,
)
from flexmarl.orchestrator.trajectory_set import EndedTrajectory
from flexmarl.scheduling import ReadySample


class Scorer(Protocol):
    """Computes token columns and keeps them in the store; the training engine."""

    def score(
        self,
        policy: PolicyName,
        column: TokenColumn,
        turns: Sequence[TurnRow],
        on_done: Callable[[tuple[TokenValues, ...]], None],
    ) -> None:
        """Call `on_done` with the column of every turn once it is durable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingSeams:
    """What a step's queries are closed with."""

    algorithms: Mapping[PolicyName, AlgorithmConfig]
    agents: Mapping[AgentName, PolicyName]
    max_extensions: int
    store: ExperienceStore
    inbox: Inbox
    events: EventSink
    scorer: Scorer
    on_ready: Callable[[PolicyName, list[ReadySample]], None]
    """Called with samples that may be trained."""
    on_extend: Callable[[StepExtension], None]
    """Called with further trajectories to run."""
    on_changed: Callable[[], None]
    """Called when a query has got all of its trajectories, and when one has closed."""


@dataclass(slots=True)
class _Query:
    """The trajectories of one query."""

    num_expected: int
    num_extensions: int = 0
    ended: list[EndedTrajectory] = field(default_factory=list)
    is_generated: bool = False
    """No trajectory of it will be added any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generated:
    """What the trajectories of a query left behind."""

    query: int
    rows: Mapping[SampleKey, TurnRow]
    """Those that an outcome names."""
    abandoned: Sequence[TurnRow]
    outcomes: Sequence[OutcomeRecord]


class StepCloser:
    """Closes the queries of one step."""

    def __init__(self, dispatch: DispatchRecord, seams: ClosingSeams) -> None:
        """Wait for the trajectories of `dispatch`."""
        self._step = dispatch.step
        self._num_trajectories = dispatch.num_trajectories
        self._seams = seams
        self._queries = {query: _Query(dispatch.num_trajectories) for query in dispatch.queries}
        self._may_score = False
        self._waiting: list[Callable[[], None]] = []
        """Scoring that is held back until it is the step's turn."""
        self._scored: dict[tuple[PolicyName, TokenColumn], dict[SampleKey, tuple[float, ...]]] = {}
        self._held: dict[PolicyName, list[AdvantageValue]] = {}
        """Samples whose advantage needs a statistic over the whole step."""
        self._weights: dict[SampleKey, float] = {}
        self._num_tokens: dict[SampleKey, int] = {}
        """Of samples that are not ready yet."""
        self._is_closed = False
        self.num_closed = 0
        self.num_extended = 0
        """Queries that got further trajectories."""
        self.num_masked: dict[tuple[AgentName, str], int] = {}
        self.num_ready: dict[PolicyName, int] = {}
        self.num_zero_advantage: dict[PolicyName, int] = {}
        """Ready samples of advantage zero, mostly those of groups whose rewards are all equal: they train nothing."""

    def restore(self, stored: StoredStep) -> None:
        """Take over what a run that was interrupted had recorded of the step."""
        for extension in stored.extensions:
            query = self._queries[extension.query]
            query.num_expected += extension.num_trajectories
            query.num_extensions += 1
            self.num_extended += query.num_extensions == 1
        for policy, columns in stored.scored.items():
            for column, values in columns.items():
                self._scored[policy, column] = {each.key: each.values for each in values}

    @property
    def is_generated(self) -> bool:
        """Every trajectory has ended, and none will be added."""
        return all(query.is_generated for query in self._queries.values())

    @property
    def is_closed(self) -> bool:
        """Every query has closed, and every sample is ready or masked."""
        return self._is_closed

    @property
    def num_open(self) -> int:
        """Queries that have not closed."""
        return len(self._queries) - self.num_closed

    def allow_scoring(self) -> None:
        """It is the step's turn in the training engine."""
        self._may_score = True
        waiting, self._waiting = self._waiting, []
        for score in waiting:
            score()

    def ended(self, trajectory: EndedTrajectory) -> None:
        """A trajectory has ended; the last one of a query closes it, or extends it."""
        query = self._queries[trajectory.key.query]
        query.ended.append(trajectory)
        if len(query.ended) < query.num_expected:
            return
        found = _generated(trajectory.key.query, sorted(query.ended, key=lambda each: each.key))
        can_extend = query.num_extensions < self._seams.max_extensions
        if can_extend and found.outcomes and not has_signal(self._judge(found, {})):
            extension = StepExtension(
                step=self._step,
                query=found.query,
                first_trajectory=query.num_expected,
                num_trajectories=self._num_trajectories,
            )
            query.num_expected += extension.num_trajectories
            query.num_extensions += 1
            self.num_extended += query.num_extensions == 1
            self._seams.on_extend(extension)
            return
        query.is_generated = True
        self._seams.on_changed()
        self._close(found)

    # --- one query ----------------------------------------------------------------------------------------------------

    def _close(self, found: _Generated) -> None:
        """Score what rewards depend on, then judge."""
        needed = [
            (policy, TokenColumn.REFERENCE_LOGPROBS, rows)
            for policy, rows in _by_policy(found.rows.values()).items()
            if self._seams.algorithms[policy].kl_coef > 0 and self._seams.algorithms[policy].kl_in == "reward"
        ]
        self._score(needed, lambda: self._judged(found, self._judge(found, self._penalties(needed))))

    def _judged(self, found: _Generated, closing: QueryClosing) -> None:
        """Score what training needs, then write."""
        needed = [
            (policy, column, [found.rows[value.key] for value in values])
            for policy, values in closing.values.items()
            for column in token_columns(self._seams.algorithms[policy])
        ]
        self._score(needed, lambda: self._write(found, closing))

    def _judge(self, found: _Generated, penalties: Mapping[SampleKey, float]) -> QueryClosing:
        return close_query(
            [TurnFacts(key=row.key, finish_reason=row.finish_reason) for row in found.rows.values()],
            found.outcomes,
            config=self._seams.algorithms,
            policy_of=self._seams.agents,
            penalties=penalties,
        )

    def _penalties(self, scored: Sequence[tuple[PolicyName, TokenColumn, list[TurnRow]]]) -> dict[SampleKey, float]:
        return {
            row.key: kl_penalty(
                row.logprobs,
                self._scored[policy, column][row.key],
                kl_coef=self._seams.algorithms[policy].kl_coef,
            )
            for policy, column, rows in scored
            for row in rows
        }

    def _score(self, needed: Sequence[tuple[PolicyName, TokenColumn, list[TurnRow]]], then: Callable[[], None]) -> None:
        """Call `then` once the columns are scored and durable; at once when they are."""
        missing = []
        for policy, column, rows in needed:
            known = self._scored.setdefault((policy, column), {})
            if left := [row for row in rows if row.key not in known]:
                missing.append((policy, column, left))
        if not missing:
            then()
            return
        if not self._may_score:
            self._waiting.append(lambda: self._score(needed, then))
            return
        num_left = len(missing)

        def scored(policy: PolicyName, column: TokenColumn, values: tuple[TokenValues, ...]) -> None:
            nonlocal num_left
            self._scored[policy, column].update((each.key, each.values) for each in values)
            num_left -= 1
            if num_left == 0:
                then()

        for policy, column, rows in missing:
            self._seams.scorer.score(policy, column, rows, partial(scored, policy, column))

    def _write(self, found: _Generated, closing: QueryClosing) -> None:
        """Fill the advantages that are final and mask; samples of a batch statistic are held until all have closed."""
        for outcome in found.outcomes:
            for columns in outcome.turn_columns:
                name = self._seams.algorithms[self._seams.agents[columns.key.agent]].weight_column
                if name is not None:
                    self._weights[columns.key] = float(columns.values[name])
        final: dict[PolicyName, list[AdvantageValue]] = {}
        for policy, values in closing.values.items():
            self._num_tokens.update((value.key, _num_tokens(found.rows[value.key])) for value in values)
            if self._seams.algorithms[policy].advantage_scale == "batch_std":
                self._held.setdefault(policy, []).extend(values)
            else:
                final[policy] = self._weighted(values)

        async def write() -> None:
            for policy, values in final.items():
                if values:
                    await self._seams.store.fill(policy, values)
            for policy, samples in closing.masked.items():
                for reason in sorted({sample.reason for sample in samples}):
                    keys = [sample.key for sample in samples if sample.reason == reason]
                    await self._seams.store.mask(policy, keys, reason)

        name = f"store.fill s{self._step}/q{found.query}"
        self._seams.inbox.start(name, write(), lambda _: self._written(found, closing, final))

    def _written(
        self, found: _Generated, closing: QueryClosing, final: Mapping[PolicyName, list[AdvantageValue]]
    ) -> None:
        masked = _masked(closing, found.abandoned)
        for (agent, reason), keys in masked.items():
            self._seams.events.emit(SamplesMasked(reason=reason, agent=agent, keys=tuple(keys)))
            self.num_masked[agent, reason] = self.num_masked.get((agent, reason), 0) + len(keys)
        num_ready = sum(len(values) for values in closing.values.values())
        num_masked = sum(len(keys) for keys in masked.values())
        self._seams.events.emit(GroupClosed(query=found.query, num_ready=num_ready, num_masked=num_masked))
        for policy, values in closing.values.items():
            self.num_ready[policy] = self.num_ready.get(policy, 0) + len(values)
            num_zero = sum(value.advantage == 0.0 for value in values)
            self.num_zero_advantage[policy] = self.num_zero_advantage.get(policy, 0) + num_zero
        self.num_closed += 1
        for policy, ready in final.items():
            self._hand_over(policy, ready)
        if self.num_closed == len(self._queries):
            self._finish()
        else:
            self._seams.on_changed()

    # --- the whole step -----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Every query has closed: samples that were held can be filled."""
        scaled = {policy: self._weighted(scale_by_batch(values)) for policy, values in sorted(self._held.items())}

        async def write() -> None:
            for policy, values in scaled.items():
                await self._seams.store.fill(policy, values)

        def written(_: None) -> None:
            for policy, values in scaled.items():
                self._hand_over(policy, values)
            self._is_closed = True
            self._seams.on_changed()

        if scaled:
            self._seams.inbox.start(f"store.fill s{self._step}", write(), written)
        else:
            written(None)

    def _weighted(self, values: Sequence[AdvantageValue]) -> list[AdvantageValue]:
        return [replace(value, advantage=value.advantage * self._weights.get(value.key, 1.0)) for value in values]

    def _hand_over(self, policy: PolicyName, values: Sequence[AdvantageValue]) -> None:
        ready = [ReadySample(key=value.key, num_tokens=self._num_tokens.pop(value.key)) for value in values]
        if ready:
            self._seams.on_ready(policy, ready)


def _generated(query: int, trajectories: Sequence[EndedTrajectory]) -> _Generated:
    rows: dict[SampleKey, TurnRow] = {}
    abandoned: list[TurnRow] = []
    for each in trajectories:
        if each.outcome is None:
            continue
        named = set(each.outcome.turns)
        rows.update((row.key, row) for row in each.turns if row.key in named)
        abandoned.extend(row for row in each.turns if row.key not in named)
    outcomes = [each.outcome for each in trajectories if each.outcome is not None]
    return _Generated(query=query, rows=rows, abandoned=abandoned, outcomes=outcomes)


def _by_policy(rows: Iterable[TurnRow]) -> dict[PolicyName, list[TurnRow]]:
    by_policy: dict[PolicyName, list[TurnRow]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, []).append(row)
    return by_policy


def _masked(closing: QueryClosing, abandoned: Sequence[TurnRow]) -> dict[tuple[AgentName, str], list[SampleKey]]:
    masked: dict[tuple[AgentName, str], list[SampleKey]] = {}
    for samples in closing.masked.values():
        for sample in samples:
            masked.setdefault((sample.key.agent, sample.reason), []).append(sample.key)
    for row in abandoned:
        masked.setdefault((row.key.agent, NOT_IN_OUTCOME), []).append(row.key)
    return masked


def _num_tokens(row: TurnRow) -> int:
    return len(row.prompt_tokens) + len(row.response_tokens)
