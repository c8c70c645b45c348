"""What a workflow is written with: Episode, its agents, their turns, and the Outcome.

    @flexmarl.workflow
    async def team(episode: flexmarl.Episode) -> flexmarl.Outcome:
        draft = await episode.agent("writer").chat(episode.query["task"])
        verdict = await episode.agent("judge").chat(draft.text)
        is_good = verdict.text == "good"
        return flexmarl.Outcome(rewards={"writer": float(is_good), "judge": 0.5}, success=is_good)

Agents exchange text; each keeps its history as token ids: the prompt of a turn is the prompt of the turn before, plus
the tokens that were generated, plus the tokens of the new message. Nothing that was generated is encoded again.
"""

import dataclasses
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flexmarl.core.errors import WorkflowError
from flexmarl.core.ids import AgentName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AgentClient, ChatMessage, Tokenizer
from flexmarl.core.records import Completion, FinishReason, SamplingParams
from flexmarl.workflow.turns import Turn

WORKFLOW_MARK = "__flexmarl_workflow__"

F = TypeVar("F", bound=Callable[..., Any])

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def workflow(function: F) -> F:
    """Mark an async function of one Episode as a workflow.

    Raises:
        WorkflowError: the function is not async, or does not take exactly one argument.
    """
    if not inspect.iscoroutinefunction(function):
        raise WorkflowError(f"workflow {function.__qualname__} is not async: write `async def {function.__name__}`")
    parameters = list(inspect.signature(function).parameters.values())
    num_required = sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
    takes_episode = bool(parameters) and parameters[0].kind in _POSITIONAL
    if not takes_episode or num_required > 1:
        raise WorkflowError(f"workflow {function.__qualname__} must take one argument, the episode")
    setattr(function, WORKFLOW_MARK, True)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trajectory went."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward per agent. Each agent that acted needs one here, or on a turn."""
    success: bool | None = None
    """Team success by the task's verifier; what evaluations report."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers to average and log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSetup:
    """What the configuration says of an agent."""

    tokenizer: Tokenizer
    sampling: SamplingParams
    system_prompt: str | None = None
    column_types: Mapping[str, str] = field(default_factory=dict)
    """User columns of a turn (`store.columns`): name to `int`, `float`, `bool` or `str`."""
    required_columns: frozenset[str] = frozenset()
    """Those without which a turn cannot be trained."""


class AgentHandle:
    """One branch of one agent within an episode; gets turns and keeps their history."""

    def __init__(
        self,
        name: AgentName,
        branch: int,
        trajectory: TrajectoryKey,
        setup: AgentSetup,
        client: AgentClient,
    ) -> None:
        """Made by `Episode.agent`."""
        self.name = name
        self.branch = branch
        self.turns: list[Turn] = []
        self._trajectory = trajectory
        self._setup = setup
        self._client = client
        self._history: list[int] = []
        self._running: SampleKey | None = None
        self._num_started = 0

    async def chat(
        self,
        message: str,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> Turn:
        """Send a user message and return the agent's answer.

        Raises:
            WorkflowError: a call on this agent and branch is still running, an argument is wrong, or the generation
                failed for good.
        """
        if not isinstance(message, str):
            raise WorkflowError(f"agent {self.name}: chat() takes text, got {type(message).__name__} {message!r:.60}")
        key = self._next_key()
        if self._running is not None:
            raise WorkflowError(
                f"agent {self.name}, branch {self.branch}: two overlapping calls, {self._running} and {key}; "
                f'await the first, or use episode.agent("{self.name}", branch=...) for concurrent ones'
            )
        sampling = self._sampling(max_new_tokens, temperature)
        prompt = self._prompt(message)
        self._running = key
        self._num_started += 1
        try:
            completion = await self._client.generate(key, prompt, sampling, self._setup.tokenizer.stop_token_ids)
        finally:
            self._running = None
        return self._add_turn(key, prompt, completion)

    def _next_key(self) -> SampleKey:
        t = self._trajectory
        return SampleKey(t.step, t.query, t.trajectory, self.name, self.branch, self._num_started)

    def _prompt(self, message: str) -> list[int]:
        user = ChatMessage(role="user", content=message)
        if not self.turns:
            system = self._setup.system_prompt
            first = [] if system is None else [ChatMessage(role="system", content=system)]
            return self._setup.tokenizer.render([*first, user])
        is_stopped = self.turns[-1].finish_reason is FinishReason.STOP
        return self._history + self._setup.tokenizer.render_continuation([user], is_stopped=is_stopped)

    def _sampling(self, max_new_tokens: int | None, temperature: float | None) -> SamplingParams:
        sampling = self._setup.sampling
        if max_new_tokens is not None:
            if not _is_whole(max_new_tokens, at_least=1):
                raise WorkflowError(
                    f"agent {self.name}: max_new_tokens={max_new_tokens!r}, must be a whole number of 1 or more"
                )
            sampling = dataclasses.replace(sampling, max_new_tokens=max_new_tokens)
        if temperature is not None:
            if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
                raise WorkflowError(f"agent {self.name}: temperature={temperature!r}, must be above 0 and finite")
            sampling = dataclasses.replace(sampling, temperature=temperature)
        return sampling

    def _add_turn(self, key: SampleKey, prompt: Sequence[int], completion: Completion) -> Turn:
        self._history = [*prompt, *completion.tokens]
        turn = Turn(
            key=key,
            text=self._setup.tokenizer.decode(completion.tokens),
            tokens=completion.tokens,
            finish_reason=completion.finish_reason,
            column_types=self._setup.column_types,
        )
        self.turns.append(turn)
        return turn


class Episode:
    """One run of the workflow on one query."""

    def __init__(
        self,
        query: Mapping[str, Any],
        trajectory: TrajectoryKey,
        setups: Mapping[AgentName, AgentSetup],
        client: AgentClient,
        *,
        seed: int,
    ) -> None:
        """Made by an episode worker, and by tests."""
        self.query = query
        """The row of the data set."""
        self.rng = random.Random(seed)  # noqa: S311 (not for secrets)
        """The workflow's only randomness: the same for this trajectory whenever it runs."""
        self._trajectory = trajectory
        self._setups = setups
        self._client = client
        self._agents: dict[tuple[AgentName, int], AgentHandle] = {}

    def agent(self, name: str, *, branch: int = 0) -> AgentHandle:
        """Return the agent `name`; each branch has a history of its own and may run concurrently with others.

        Raises:
            WorkflowError: the configuration has no such agent, or `branch` is not a whole number of 0 or more.
        """
        agent = AgentName(name)
        if agent not in self._setups:
            raise WorkflowError(f"no agent {name!r}; the configuration has: {', '.join(sorted(self._setups))}")
        if not _is_whole(branch, at_least=0):
            raise WorkflowError(f"agent {name}: branch={branch!r}, must be a whole number of 0 or more")
        if (agent, branch) not in self._agents:
            self._agents[agent, branch] = AgentHandle(
                agent, branch, self._trajectory, self._setups[agent], self._client
            )
        return self._agents[agent, branch]

    def turns(self) -> list[Turn]:
        """Return every finished turn, in key order."""
        return sorted((turn for agent in self._agents.values() for turn in agent.turns), key=lambda turn: turn.key)


def _is_whole(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
