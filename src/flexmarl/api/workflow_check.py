"""Judges what a workflow does on a few queries with scripted answers.

Only what no answer of a model could change is an error: a field that the query lacks, and whatever fails before the
first answer. The rest may be the fault of the scripted answers, and is a warning.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexmarl.api.data import Query, Split, query_place
from flexmarl.api.dry_run import DryCase, DryEpisode, run_dry
from flexmarl.config import RootConfig
from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import AgentName
from flexmarl.core.rng import derive_seed
from flexmarl.workflow.api import AgentSetup, Episode

QUICK_BUDGET_S = 0.4
THOROUGH_BUDGET_S = 10.0
_GENERAL_ANSWERS = ("1", "yes", "no", "")
_LONGEST_ANSWER = 60
"""Fields of a query that are no longer are tried as answers: one of them may be the right one."""
_MAX_FIELD_ANSWERS = 4
_NUM_QUICK_ANSWERS = 2
_MAX_ODD_QUERIES = 8
"""Queries of another shape than the first that are tried."""
_WRONG_OUTCOMES = ("bad_reward", "bad_column")
"""Kinds of failures of what a workflow returned, or gave to its turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowCheck:
    """What is known of a workflow that no certain fault was found in."""

    num_episodes: int
    """Scripted episodes that ended in time."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    split: Split
    number: int


class WorkflowChecker:
    """Runs one workflow on scripted answers and judges it. Use once."""

    def __init__(
        self,
        config: RootConfig,
        function: Callable[[Episode], Awaitable[Any]],
        setups: Mapping[AgentName, AgentSetup],
        queries: Mapping[Split, Sequence[Query]],
        *,
        context_tokens: Mapping[AgentName, int],
    ) -> None:
        """Take a workflow, its agents, their models' contexts and every query of both splits."""
        self._config = config
        self._function = function
        self._setups = setups
        self._queries = queries
        self._context_tokens = context_tokens
        self._episodes: list[tuple[_Place, DryEpisode]] = []
        self._num_cases = 0

    def check(self, *, is_thorough: bool) -> WorkflowCheck:
        """Run it on the first query of each split, then on those that differ from them: other fields, or the longest.

        Raises:
            ConfigError: it fails, whatever the models will answer; no outcome has the columns that training needs; or,
                when `is_thorough`, all its outcomes are wrong.
        """
        deadline_s = time.monotonic() + (THOROUGH_BUDGET_S if is_thorough else QUICK_BUDGET_S)
        firsts = [_Place(split=split, number=0) for split, queries in self._queries.items() if queries]
        self._run(firsts, None if is_thorough else _NUM_QUICK_ANSWERS, deadline_s)
        fields = sorted({field for _, episode in self._episodes for field in episode.read_fields})
        self._run(list(self._odd_places(fields)), 1, deadline_s)
        self._refuse_code_fault()
        self._refuse_wrong_outcomes(("bad_column",))
        if is_thorough:
            self._refuse_wrong_outcomes(_WRONG_OUTCOMES)
        return WorkflowCheck(num_episodes=len(self._episodes), warnings=tuple(self._warnings()))

    def _run(self, places: Sequence[_Place], num_answers: int | None, deadline_s: float) -> None:
        """Run the workflow on each place with each of the first `num_answers` scripts; None runs all."""
        cases: list[tuple[_Place, DryCase]] = []
        for place in places:
            query = self._queries[place.split][place.number]
            scripts = _scripts(query)[:num_answers]
            cases += [
                (
                    place,
                    DryCase(query=query, answers=script, seed=derive_seed(self._config.run.seed, "dry_run", number)),
                )
                for number, script in enumerate(scripts)
            ]
        if not cases:
            return
        self._num_cases += len(cases)
        budget_s = deadline_s - time.monotonic()
        ended = run_dry(
            self._function,
            self._setups,
            [case for _, case in cases],
            context_tokens=self._context_tokens,
            budget_s=max(budget_s, 0.0),
        )
        for episode in ended:
            place = cases[episode.case][0]
            self._refuse_certain_failure(place, episode)
            self._episodes.append((place, episode))

    def _odd_places(self, fields: Sequence[str]) -> Iterator[_Place]:
        """Yield the query with the most text in `fields`, and the first of each further combination of their types."""
        shapes = {_shape(queries[0], fields) for queries in self._queries.values() if queries}
        num_found = 0
        for split, queries in self._queries.items():
            longest = max(range(len(queries)), key=lambda number: _num_characters(queries[number], fields), default=0)
            if longest > 0:
                yield _Place(split=split, number=longest)
            for number, query in enumerate(queries):
                shape = _shape(query, fields)
                if shape not in shapes and num_found < _MAX_ODD_QUERIES:
                    num_found += 1
                    shapes.add(shape)
                    yield _Place(split=split, number=number)

    def _refuse_certain_failure(self, place: _Place, episode: DryEpisode) -> None:
        if episode.failure_kind is None:
            return
        head = f"workflow.path={self._config.workflow.path!r} fails on {self._where(place)}: {episode.message}"
        if episode.failure_kind == "prompt_too_long" and episode.num_turns == 0:
            raise ConfigError(f"{head}; shorten or leave out the query, or use a model with a longer context")
        if episode.missing_field is not None:
            known = ", ".join(sorted(self._queries[place.split][place.number])) or "none"
            raise ConfigError(
                f"{head}; the fields of that query: {known}; add {episode.missing_field!r} to the data, or let the "
                "workflow do without it"
            )
        if episode.num_turns == 0 and episode.failure_kind in ("workflow_error", *_WRONG_OUTCOMES):
            raise ConfigError(f"{head} (before an agent was asked, so no answer can change it)")

    def _refuse_code_fault(self) -> None:
        """Refuse what no answer can mend: every dry run ends with the kind of error that a typing mistake gives."""
        if not self._episodes or not all(_is_code_fault(episode.message or "") for _, episode in self._episodes):
            return
        place, episode = self._episodes[0]
        hint = "; did you forget an await?" if "'coroutine'" in (episode.message or "") else ""
        raise ConfigError(
            f"workflow.path={self._config.workflow.path!r} fails on {self._where(place)}: {episode.message}{hint} "
            f"(so it did in each of {len(self._episodes)} dry runs)"
        )

    def _refuse_wrong_outcomes(self, kinds: Sequence[str]) -> None:
        """Refuse when every dry run that came to an outcome failed for one of these kinds."""
        judged = [item for item in self._episodes if item[1].failure_kind in (None, *_WRONG_OUTCOMES)]
        if judged and all(episode.failure_kind in kinds for _, episode in judged):
            place, episode = judged[0]
            raise ConfigError(
                f"workflow.path={self._config.workflow.path!r} on {self._where(place)}: {episode.message} (so it was "
                f"with each of {len(judged)} dry runs)"
            )

    def _warnings(self) -> Iterator[str]:
        for kind in sorted({str(e.failure_kind) for _, e in self._episodes if e.failure_kind is not None}):
            failed = [(place, episode) for place, episode in self._episodes if episode.failure_kind == kind]
            place, first = failed[0]
            yield (
                f"the workflow failed in {len(failed)} of {len(self._episodes)} dry runs ({kind}), the first on "
                f"{self._where(place)}: {first.message}; ignore it if only the scripted answers are to blame"
            )
        if num_missing := self._num_cases - len(self._episodes):
            yield (
                f"{num_missing} of {self._num_cases} dry runs did not end within {THOROUGH_BUDGET_S:g} s and tell "
                "nothing: does the workflow wait for something, or block the event loop?"
            )
        if not self._episodes:
            return
        reached = {agent for _, episode in self._episodes for agent in episode.agents}
        for agent in sorted(set(self._config.agents) - reached):
            yield (
                f"agent {agent} was never asked in {len(self._episodes)} dry runs with scripted answers: its policy "
                f"{self._config.agents[agent].policy} learns only from turns of its agents"
            )

    def _where(self, place: _Place) -> str:
        return query_place(self._config, place.split, place.number)


def _is_code_fault(message: str) -> bool:
    return message.startswith(("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")) or any(
        text in message for text in ("'coroutine' object", "no agent '")
    )


def _scripts(query: Query) -> list[tuple[str, ...]]:
    """Return what agents may answer: always the same, a general word or a value of the query; or all in turn."""
    values = [str(value) for value in query.values() if isinstance(value, str | int | float)]
    from_query = [value for value in values if len(value) <= _LONGEST_ANSWER][-_MAX_FIELD_ANSWERS:]
    answers = list(dict.fromkeys([*_GENERAL_ANSWERS[:1], *from_query, *_GENERAL_ANSWERS[1:]]))
    return [*((answer,) for answer in answers), tuple(answers), tuple(reversed(answers))]


def _shape(query: Query, fields: Sequence[str]) -> tuple[str, ...]:
    return tuple(type(query[field]).__name__ if field in query else "" for field in fields)


def _num_characters(query: Query, fields: Sequence[str]) -> int:
    return sum(len(str(query[field])) for field in fields if field in query)
