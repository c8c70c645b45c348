"""Runs one evaluation at a version boundary. It bounds its own time, and its failure does not stop the run."""

from collections.abc import Callable

from flexmarl.core.ids import Purpose
from flexmarl.orchestrator.episodes import Episodes
from flexmarl.orchestrator.evaluation import EvaluationResult, NoSink, evaluation_result, evaluation_set
from flexmarl.orchestrator.inbox import OrderedInbox
from flexmarl.orchestrator.parts import RunParts
from flexmarl.orchestrator.trajectory_set import EndedTrajectory


class Evaluator:
    """One evaluation. Its methods are handlers: synchronous, called from the inbox."""

    def __init__(
        self,
        parts: RunParts,
        *,
        policy_version: int,
        episodes: Episodes,
        inbox: OrderedInbox,
        on_done: Callable[[EvaluationResult | str], None],
    ) -> None:
        """Start nothing yet; `on_done` is called once, with the result or with why there is none."""
        self._parts = parts
        self._on_done = on_done
        self._start_s = parts.runtime.clock.now_s()
        self._ended: list[EndedTrajectory] = []
        self._set = evaluation_set(parts.config.eval, parts.held_out_queries, policy_version=policy_version)
        self._policy_version = policy_version
        self._episodes = episodes
        self._pool = episodes.run(self._set, NoSink(), self._trajectory_ended, step=policy_version)
        self._timer = inbox.set_timer(f"evaluation {policy_version}", parts.config.eval.timeout_s, self._timed_out)

    def start(self) -> None:
        """Let the trajectories run."""
        self._pool.open()

    def cancel(self) -> None:
        """Give the evaluation up; `on_done` is not called."""
        self._timer.cancel()
        self._give_up()

    def _trajectory_ended(self, trajectory: EndedTrajectory) -> None:
        self._ended.append(trajectory)
        self._parts.listener.on_rollout_progress(self._pool.num_ended, self._pool.num_trajectories)
        if self._pool.is_done:
            self._timer.cancel()
            self._episodes.forget(Purpose.EVAL, self._policy_version)
            duration_s = self._parts.runtime.clock.now_s() - self._start_s
            self._on_done(evaluation_result(self._ended, self._set, duration_s=duration_s))

    def _give_up(self) -> None:
        self._pool.cancel()
        self._episodes.forget(Purpose.EVAL, self._policy_version)

    def _timed_out(self) -> None:
        self._give_up()
        self._on_done(
            f"took longer than eval.timeout_s={self._parts.config.eval.timeout_s:g}; "
            f"{self._pool.num_ended} of {self._pool.num_trajectories} trajectories had ended"
        )
