"""Forward-only work of one policy: token columns of turns, computed by its process group and filled into the store.

Invariants (tests name them):

* every request is answered once, with a value list per turn in its order, after the store has them;
* what an incarnation had not answered when it died is computed again by the next one;
* old log-probs are never computed between two updates of one step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import SampleKey
from flexmarl.core.messages import Score, Scored
from flexmarl.core.records import TokenColumn, TokenValues, TurnRow
from flexmarl.scheduling import ReadySample, cut_in_order
from flexmarl.training.incarnation import Incarnation
from flexmarl.training.state import PolicyStanding, TrainingSeams
from flexmarl.training.work import DeathCounts, InterruptedWork, describe_rows


@dataclass(slots=True, kw_only=True)
class _Request:
    """Turns that somebody waits for."""

    column: TokenColumn
    turns: Sequence[TurnRow]
    on_done: Callable[[tuple[TokenValues, ...]], None]
    values: dict[SampleKey, TokenValues] = field(default_factory=dict)
    """Those in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A turn that waits."""

    request: _Request
    turn: TurnRow

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.turn.prompt_tokens) + len(self.turn.response_tokens)

    @property
    def counted_as(self) -> tuple[TokenColumn, SampleKey]:
        """For counts of deaths."""
        return self.request.column, self.turn.key


class Scoring:
    """The queue of one policy; first come, first served, but small requests for the same column share a batch."""

    def __init__(self, process: Incarnation, standing: PolicyStanding, seams: TrainingSeams) -> None:
        """Begin with an empty queue."""
        self._process = process
        self._standing = standing
        self._seams = seams
        self._waiting: deque[_Item] = deque()
        self.num_backlog_tokens = 0
        """Tokens of the turns that wait."""
        self._in_flight: tuple[str, list[_Item]] | None = None
        self._num_batches = 0
        self._deaths = DeathCounts()

    def add(
        self,
        column: TokenColumn,
        turns: Sequence[TurnRow],
        on_done: Callable[[tuple[TokenValues, ...]], None],
    ) -> None:
        """Queue turns with distinct keys; `on_done` gets their values in this order."""
        request = _Request(column=column, turns=tuple(turns), on_done=on_done)
        if not turns:
            on_done(())
        items = [_Item(request=request, turn=turn) for turn in turns]
        self._waiting.extend(items)
        self.num_backlog_tokens += sum(item.num_tokens for item in items)

    def advance(self, *, is_between_updates: bool) -> bool:
        """Send the next batch; return False when there is none that may be computed now."""
        held = TokenColumn.OLD_LOGPROBS if is_between_updates else None
        column = next((item.request.column for item in self._waiting if item.request.column is not held), None)
        if column is None:
            return False
        batch = self._take_batch(column)
        score_id = f"{self._standing.policy}/score{self._num_batches}"
        self._num_batches += 1
        self._in_flight = (score_id, batch)
        self._process.command(Score(score_id=score_id, column=column, turns=tuple(item.turn for item in batch)))
        return True

    def _take_batch(self, column: TokenColumn) -> list[_Item]:
        candidates = [item for item in self._waiting if item.request.column is column]
        sizes = [ReadySample(key=item.turn.key, num_tokens=item.num_tokens) for item in candidates]
        first = cut_in_order(sizes, max_tokens=self._seams.config.micro_batch_tokens)[0]
        batch = candidates[: len(first)]
        taken = {id(item) for item in batch}
        self._waiting = deque(item for item in self._waiting if id(item) not in taken)
        self.num_backlog_tokens -= sum(item.num_tokens for item in batch)
        return batch

    def take(self, fact: Scored) -> None:
        """Put the values into the store; the process group is free meanwhile, and may die."""
        if self._in_flight is None or self._in_flight[0] != fact.score_id:
            raise InvariantError(f"{self._process.worker_id} answers {fact.score_id}, in flight is {self._in_flight}")
        batch = self._in_flight[1]
        self._in_flight = None
        expected = [(item.turn.key, len(item.turn.response_tokens)) for item in batch]
        found = [(values.key, len(values.values)) for values in fact.values]
        if fact.column is not batch[0].request.column or found != expected:
            raise InvariantError(
                f"{self._process.worker_id} answers {fact.score_id} with {fact.column} of {found[:3]}, asked for was "
                f"{batch[0].request.column} of {expected[:3]} (row, response tokens)"
            )
        self._deaths.finished(item.counted_as for item in batch)
        work = self._seams.store.fill_tokens(self._standing.policy, fact.column, fact.values)
        self._seams.inbox.start(f"store.fill_tokens {fact.score_id}", work, lambda _: self._filled(batch, fact.values))

    def _filled(self, batch: Sequence[_Item], values: Sequence[TokenValues]) -> None:
        for item, value in zip(batch, values, strict=True):
            request = item.request
            request.values[item.turn.key] = value
            if len(request.values) == len(request.turns):
                request.on_done(tuple(request.values[turn.key] for turn in request.turns))

    def died(self) -> InterruptedWork | None:
        """Queue again what was in flight and count a death with it; None when nothing was."""
        if self._in_flight is None:
            return None
        score_id, batch = self._in_flight
        self._in_flight = None
        self._waiting.extendleft(reversed(batch))
        self.num_backlog_tokens += sum(item.num_tokens for item in batch)
        num_deaths = self._deaths.count(item.counted_as for item in batch)
        keys = (item.turn.key for item in batch)
        doing = f"{batch[0].request.column} of {describe_rows(score_id, keys)}"
        return InterruptedWork(num_deaths=num_deaths, doing=doing)
