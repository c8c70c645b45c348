"""Chooses and opens the parts of a run. The only place that names implementations of the seams."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flexmarl.algorithms.scopes import unclosable
from flexmarl.api.data import Query, Split, load_held_out_queries, load_train_queries
from flexmarl.api.model_check import ModelFacts, check_model
from flexmarl.api.workers import agent_setups, episode_worker_spec, instance_specs, needs_model, trainer_specs
from flexmarl.api.workflow_check import WorkflowCheck, WorkflowChecker
from flexmarl.config import RootConfig
from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import AgentName, WorkerId
from flexmarl.core.protocols import ExperienceStore, Runtime, Tokenizer
from flexmarl.models import resolve_model_folder
from flexmarl.orchestrator.parts import RunParts, RunResult
from flexmarl.orchestrator.trajectory_set import EndedTrajectory
from flexmarl.telemetry import (
    EventLog,
    MetricsLog,
    ProgressListener,
    RunFolder,
    check_trackers,
    open_trackers,
)
from flexmarl.workflow.load import load_workflow

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInputs:
    """The user's inputs, loaded and checked before any process or model is."""

    train_queries: list[Query]
    held_out_queries: list[Query]
    tokenizers: Mapping[str, Tokenizer]
    """By policy."""
    models: Mapping[str, ModelFacts]
    """By policy; empty when no engine loads a model."""
    workflow: WorkflowCheck | None
    """None when `workflow.dry_run` is off."""


def check_inputs(config: RootConfig, *, is_thorough: bool = False) -> CheckedInputs:
    """Load what the configuration points to, as far as no model is needed; `is_thorough` takes its time for it.

    Raises:
        ConfigError: the workflow, the data, a model folder or a tracker is missing or wrong.
    """
    check_trackers(config.telemetry.trackers)
    _check_scopes(config)
    function = load_workflow(config.workflow.path)
    setups = agent_setups(episode_worker_spec(config)(WorkerId("check")).options)
    tokenizers = {agent.policy: setups[AgentName(name)].tokenizer for name, agent in config.agents.items()}
    has_model = needs_model(config)
    models = {name: check_model(config, name, tokenizers[name]) for name in config.policies} if has_model else {}
    queries: dict[Split, list[Query]] = {
        "train": load_train_queries(config),
        "held_out": load_held_out_queries(config),
    }
    workflow = None
    if config.workflow.dry_run:
        has_context = config.rollout.backend.kind != "scripted"
        checker = WorkflowChecker(
            config,
            function,
            setups,
            queries,
            context_tokens={
                AgentName(name): models[agent.policy].context_tokens
                for name, agent in config.agents.items()
                if has_context
            },
        )
        workflow = checker.check(is_thorough=is_thorough)
    return CheckedInputs(
        train_queries=queries["train"],
        held_out_queries=queries["held_out"],
        tokenizers=tokenizers,
        models=models,
        workflow=workflow,
    )


def _check_scopes(config: RootConfig) -> None:
    """Refuse statistics that the pipeline mode cannot know in time."""
    for name in config.policies:
        for problem in unclosable(config.pipeline.mode, config.algorithm_of(name)):
            raise ConfigError(f"policy {name}: {problem}")


def run_on(config: RootConfig, folder: RunFolder, main: Callable[[Runtime], Awaitable[T]]) -> T:
    """Open the runtime that the configuration names, run `main` on it, and close it."""
    if config.runtime.kind == "simulated":
        from flexmarl.runtime.simulated import run_virtual

        return run_virtual(main, config.runtime)
    from flexmarl.runtime.local.supervisor import LocalRuntime

    async def run() -> T:
        preload = ["flexmarl.rollout.instance", "flexmarl.training.process_group", *_engine_imports(config)]
        run_id = f"{config.run.name}-{os.getpid()}-{time.time_ns():x}"
        runtime = await LocalRuntime.open(folder.path, run_id, config.runtime, preload)
        try:
            return await main(runtime)
        finally:
            await runtime.close()

    return asyncio.run(run())


def _engine_imports(config: RootConfig) -> list[str]:
    """Modules that worker processes need, imported once in the fork server."""
    modules = []
    if config.workflow.num_workers > 0:
        modules.append("flexmarl.api.workers")
    if config.rollout.backend.kind == "transformers":
        modules.append("flexmarl.rollout.backends.transformers")
    if config.training.backend.kind == "torch":
        modules.append("flexmarl.training.backends.torch")
    if needs_model(config):
        modules += _model_modules(config)
    return modules


def _model_modules(config: RootConfig) -> list[str]:
    modules = set()
    for policy in config.policies.values():
        plain = json.loads((resolve_model_folder(policy.model) / "config.json").read_text(encoding="utf-8"))
        kind = str(plain.get("model_type", "")).replace("-", "_")
        modules.add(f"transformers.models.{kind}.modeling_{kind}")
    return sorted(modules)


async def build_parts(
    config: RootConfig,
    inputs: CheckedInputs,
    folder: RunFolder,
    runtime: Runtime,
    *,
    first_step: int,
    store: ExperienceStore,
    listener: ProgressListener,
    on_opened: Callable[[], None],
    on_baseline: Callable[[RunResult], None],
) -> RunParts:
    """Put together what the orchestrator runs on."""
    events = EventLog(folder.events_path, runtime.clock)
    metrics = MetricsLog(folder.metrics_path, first_step=first_step)
    trackers = open_trackers(
        config.telemetry.trackers, run_dir=folder.path, run_name=config.run.name, config=config.model_dump(mode="json")
    )

    def close() -> None:
        events.close()
        metrics.close()
        trackers.close()

    return RunParts(
        config=config,
        runtime=runtime,
        store=store,
        events=events,
        flush_events=events.flush,
        close=close,
        metrics=metrics,
        trackers=trackers,
        listener=listener,
        instance_specs=instance_specs(config),
        trainer_specs=trainer_specs(config),
        episode_worker_spec=episode_worker_spec(config),
        train_queries=inputs.train_queries,
        held_out_queries=inputs.held_out_queries,
        run_dir=folder.path,
        on_trajectory=_trajectory_writer(inputs, folder.trajectories_path),
        on_opened=on_opened,
        on_baseline=on_baseline,
    )


def _trajectory_writer(inputs: CheckedInputs, path: Path) -> Callable[[EndedTrajectory], None]:
    """Return a function that appends a trajectory with its texts to a JSON-lines file."""

    def write(trajectory: EndedTrajectory) -> None:
        line = {
            "step": trajectory.key.step,
            "trajectory": trajectory.key.trajectory,
            "query": inputs.train_queries[trajectory.key.query],
            "turns": [
                {
                    "agent": row.key.agent,
                    "branch": row.key.branch,
                    "turn": row.key.turn,
                    "prompt": inputs.tokenizers[row.policy].decode(row.prompt_tokens),
                    "response": inputs.tokenizers[row.policy].decode(row.response_tokens),
                    "finish_reason": row.finish_reason,
                }
                for row in trajectory.turns
            ],
            "rewards": None if trajectory.outcome is None else dict(trajectory.outcome.rewards),
            "success": None if trajectory.outcome is None else trajectory.outcome.success,
            "failure": None if trajectory.failure is None else trajectory.failure.message,
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    return write
