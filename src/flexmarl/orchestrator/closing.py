"""Closes the queries of a step: when its last trajectory has ended, groups are final and advantages are written.

Invariant: every turn of the step becomes ready, masked with a reason, failed or superseded; none is left open.
"""

from collections.abc import Callable, Mapping

from flexmarl.algorithms import QueryClosing, TurnFacts, close_query
from flexmarl.config import AlgorithmConfig
from flexmarl.core.events import GroupClosed, SamplesMasked
from flexmarl.core.ids import AgentName, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import EventSink, ExperienceStore, Inbox
from flexmarl.core.records import DispatchRecord, OutcomeRecord, TrajectoryFailure, TurnRow
from flexmarl.orchestrator.trajectories import EndedTrajectory
from flexmarl.scheduling import ReadySample

NOT_IN_OUTCOME = "not_in_outcome"
"""Mask reason: the workflow cancelled the turn, so its outcome does not speak of it; the store masks it by itself."""


class StoreSink:
    """Implements TrajectorySink on the experience store."""

    def __init__(self, store: ExperienceStore, inbox: Inbox) -> None:
        """Keep everything in `store`."""
        self._store = store
        self._inbox = inbox

    def begin_attempt(self, key: TrajectoryKey, then: Callable[[int], None]) -> None:
        """Give the number of the next attempt."""
        self._inbox.start(f"store.begin_attempt {key}", self._store.begin_attempt(key), then)

    def put_turn(self, row: TurnRow, then: Callable[[], None]) -> None:
        """Keep a turn."""
        self._inbox.start(f"store.put_turn {row.key}", self._store.put_turn(row), lambda _: then())

    def record_outcome(self, outcome: OutcomeRecord, then: Callable[[], None]) -> None:
        """Keep an attempt's outcome."""
        name = f"store.record_outcome {outcome.trajectory}"
        self._inbox.start(name, self._store.record_outcome(outcome), lambda _: then())

    def record_failure(self, failure: TrajectoryFailure, then: Callable[[], None]) -> None:
        """Keep that a trajectory failed for good."""
        name = f"store.record_failure {failure.trajectory}"
        self._inbox.start(name, self._store.record_failure(failure), lambda _: then())


class StepCloser:
    """Closes the queries of one step."""

    def __init__(
        self,
        dispatch: DispatchRecord,
        *,
        algorithms: Mapping[PolicyName, AlgorithmConfig],
        agents: Mapping[AgentName, PolicyName],
        store: ExperienceStore,
        inbox: Inbox,
        events: EventSink,
        on_ready: Callable[[PolicyName, list[ReadySample]], None],
        on_all_closed: Callable[[], None],
    ) -> None:
        """Wait for the trajectories of `dispatch`; `on_ready` is called with samples that may be trained."""
        self._dispatch = dispatch
        self._algorithms = algorithms
        self._agents = agents
        self._store = store
        self._inbox = inbox
        self._events = events
        self._on_ready = on_ready
        self._on_all_closed = on_all_closed
        self._ended: dict[int, list[EndedTrajectory]] = {query: [] for query in dispatch.queries}
        self.num_closed = 0
        self.num_masked: dict[tuple[AgentName, str], int] = {}
        self.num_ready: dict[PolicyName, int] = {}
        self.num_zero_advantage: dict[PolicyName, int] = {}
        """Ready samples of advantage zero, mostly those of groups whose rewards are all equal: they train nothing."""

    def ended(self, trajectory: EndedTrajectory) -> None:
        """A trajectory has ended; the last one of a query closes it."""
        of_query = self._ended[trajectory.key.query]
        of_query.append(trajectory)
        if len(of_query) == self._dispatch.num_trajectories:
            self._close(trajectory.key.query, sorted(of_query, key=lambda each: each.key))

    def _close(self, query: int, trajectories: list[EndedTrajectory]) -> None:
        rows: dict[SampleKey, TurnRow] = {}
        abandoned: list[TurnRow] = []
        outcomes = [each.outcome for each in trajectories if each.outcome is not None]
        for each in trajectories:
            if each.outcome is None:
                continue
            named = set(each.outcome.turns)
            rows.update((row.key, row) for row in each.turns if row.key in named)
            abandoned.extend(row for row in each.turns if row.key not in named)
        closing = close_query(
            [TurnFacts(key=row.key, finish_reason=row.finish_reason) for row in rows.values()],
            outcomes,
            config=self._algorithms,
            policy_of=self._agents,
        )
        masked = self._masked(closing, abandoned)

        async def write() -> None:
            for policy, values in closing.values.items():
                if values:
                    await self._store.fill(policy, values)
            for policy, samples in closing.masked.items():
                for reason in sorted({sample.reason for sample in samples}):
                    keys = [sample.key for sample in samples if sample.reason == reason]
                    await self._store.mask(policy, keys, reason)

        self._inbox.start(f"store.fill q{query}", write(), lambda _: self._closed(query, rows, closing, masked))

    def _masked(self, closing: QueryClosing, abandoned: list[TurnRow]) -> dict[tuple[AgentName, str], list[SampleKey]]:
        masked: dict[tuple[AgentName, str], list[SampleKey]] = {}
        for samples in closing.masked.values():
            for sample in samples:
                masked.setdefault((sample.key.agent, sample.reason), []).append(sample.key)
        for row in abandoned:
            masked.setdefault((row.key.agent, NOT_IN_OUTCOME), []).append(row.key)
        return masked

    def _closed(
        self,
        query: int,
        rows: Mapping[SampleKey, TurnRow],
        closing: QueryClosing,
        masked: Mapping[tuple[AgentName, str], list[SampleKey]],
    ) -> None:
        for (agent, reason), keys in masked.items():
            self._events.emit(SamplesMasked(reason=reason, agent=agent, keys=tuple(keys)))
            self.num_masked[agent, reason] = self.num_masked.get((agent, reason), 0) + len(keys)
        num_ready = sum(len(values) for values in closing.values.values())
        num_masked = sum(len(keys) for keys in masked.values())
        self._events.emit(GroupClosed(query=query, num_ready=num_ready, num_masked=num_masked))
        for policy, values in closing.values.items():
            self.num_ready[policy] = self.num_ready.get(policy, 0) + len(values)
            num_zero = sum(value.advantage == 0.0 for value in values)
            self.num_zero_advantage[policy] = self.num_zero_advantage.get(policy, 0) + num_zero
            ready = [
                ReadySample(
                    key=value.key,
                    num_tokens=len(rows[value.key].prompt_tokens) + len(rows[value.key].response_tokens),
                )
                for value in values
            ]
            if ready:
                self._on_ready(policy, ready)
        self.num_closed += 1
        if self.num_closed == len(self._dispatch.queries):
            self._on_all_closed()
