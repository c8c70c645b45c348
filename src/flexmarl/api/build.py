"""Chooses and opens the parts of a run. The only place that names implementations of the seams."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flexmarl.api.data import Query, load_held_out_queries, load_train_queries
from flexmarl.api.workers import (
    episode_worker_spec,
    instance_specs,
    make_tokenizer,
    model_folder,
    needs_model,
    trainer_specs,
)
from flexmarl.config import RootConfig
from flexmarl.core.errors import ConfigError
from flexmarl.core.protocols import Runtime
from flexmarl.models import ScriptedTokenizer, context_length, resolve_model_folder
from flexmarl.orchestrator.parts import RunParts, RunResult
from flexmarl.orchestrator.trajectories import EndedTrajectory
from flexmarl.store import SqliteStore
from flexmarl.telemetry import EventLog, MetricsLog, PeakMemory, ProgressListener, RunFolder, open_trackers
from flexmarl.workflow.load import load_workflow

T = TypeVar("T")

MEMORY_SAMPLE_S = 3.0
"""Time between two looks at the memory of the process tree; one look costs some milliseconds per process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInputs:
    """The user's inputs, loaded and checked before any process or model is."""

    train_queries: list[Query]
    held_out_queries: list[Query]


def check_inputs(config: RootConfig) -> CheckedInputs:
    """Load what the configuration points to, as far as no model is needed.

    Raises:
        ConfigError: the workflow, the data or a model folder is missing or wrong.
    """
    load_workflow(config.workflow.path)
    if needs_model(config):
        for name, policy in config.policies.items():
            folder = resolve_model_folder(policy.model)
            _check_context(config, name, context_length(folder))
            if config.rollout.backend.kind == "scripted":
                _check_scripted_vocabulary(name, folder)
    return CheckedInputs(train_queries=load_train_queries(config), held_out_queries=load_held_out_queries(config))


def _check_context(config: RootConfig, policy: str, context_tokens: int) -> None:
    for name, agent in config.agents.items():
        limit = agent.max_new_tokens or config.rollout.max_new_tokens
        if agent.policy == policy and limit >= context_tokens:
            key = f"agents.{name}.max_new_tokens" if agent.max_new_tokens else "rollout.max_new_tokens"
            raise ConfigError(
                f"{key}={limit} leaves no room for a prompt: the context of policies.{policy}.model="
                f"{config.policies[policy].model} has {context_tokens} tokens; lower it"
            )


def _check_scripted_vocabulary(policy: str, folder: Path) -> None:
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size", 0)
    needed = ScriptedTokenizer().vocab_size
    if vocab_size < needed:
        raise ConfigError(
            f"rollout.backend.kind=scripted draws from {needed} token ids, but the model of policy {policy} has "
            f"vocab_size={vocab_size}: train a larger one, or set training.backend.kind=scripted"
        )


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
    store: SqliteStore,
    listener: ProgressListener,
    memory: PeakMemory,
    on_baseline: Callable[[RunResult], None],
) -> RunParts:
    """Put together what the orchestrator runs on."""
    events = EventLog(folder.events_path, runtime.clock)
    last_sample_s = -MEMORY_SAMPLE_S

    def sample_memory() -> None:
        nonlocal last_sample_s
        if runtime.clock.now_s() - last_sample_s >= MEMORY_SAMPLE_S:
            last_sample_s = runtime.clock.now_s()
            memory.sample()

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
        on_trajectory=_trajectory_writer(config, folder.trajectories_path, inputs.train_queries),
        on_boundary=sample_memory,
        on_baseline=on_baseline,
    )


def _trajectory_writer(config: RootConfig, path: Path, queries: list[Query]) -> Callable[[EndedTrajectory], None]:
    """Return a function that appends a trajectory with its texts to a JSON-lines file."""
    is_scripted = config.rollout.backend.kind == "scripted"
    tokenizers = {name: make_tokenizer(model_folder(config, name), is_scripted=is_scripted) for name in config.policies}

    def write(trajectory: EndedTrajectory) -> None:
        line = {
            "step": trajectory.key.step,
            "trajectory": trajectory.key.trajectory,
            "query": queries[trajectory.key.query],
            "turns": [
                {
                    "agent": row.key.agent,
                    "branch": row.key.branch,
                    "turn": row.key.turn,
                    "prompt": tokenizers[row.policy].decode(row.prompt_tokens),
                    "response": tokenizers[row.policy].decode(row.response_tokens),
                    "finish_reason": row.finish_reason,
                }
                for row in trajectory.turns
            ],
            "rewards": None if trajectory.outcome is None else dict(trajectory.outcome.rewards),
            "success": None if trajectory.outcome is None else trajectory.outcome.success,
            "failure": None if trajectory.failure is None else trajectory.failure.message,
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    return write
