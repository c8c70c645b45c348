"""`flexmarl.train`: runs a configuration to its last step and says what came of it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexmarl.api.build import CheckedInputs, build_parts, check_inputs, run_on
from flexmarl.api.resume import first_state, kept_options, resumed_state, write_baseline
from flexmarl.api.stores import open_store, policy_columns
from flexmarl.api.workers import model_folder, needs_model
from flexmarl.config import RootConfig, resolved_yaml
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.protocols import Runtime
from flexmarl.models import export_model
from flexmarl.orchestrator.parts import RunResult
from flexmarl.orchestrator.reports import evaluation_report, evaluation_summary, policy_summary
from flexmarl.orchestrator.run import Orchestrator
from flexmarl.telemetry import (
    PeakMemory,
    ProgressListener,
    RunFolder,
    RunSummary,
    SilentListener,
    default_run_dir,
    stop_signals,
)

MEMORY_SAMPLE_S = 15.0
"""Time between two looks at the memory of the process tree; one look costs up to 0.1 s per process of a GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to."""

    run_dir: Path
    summary: Mapping[str, Any]
    """The content of `summary.json`."""
    stopped_by: str | None
    """Signal that asked it to stop before its last step."""


def train(config: RootConfig, *, resume: bool = False, listener: ProgressListener | None = None) -> TrainResult:
    """Train a team; with `resume` go on with the run in `run.dir` where it was interrupted.

    Raises:
        ConfigError: an input is wrong; found before a process starts where that is possible.
        FlexMARLError: the run could not go on; the run folder stays readable and can be resumed.
    """
    if not isinstance(config, RootConfig):
        raise ConfigError(f"train() takes a RootConfig, got {config!r:.80}: read it with flexmarl.load_config(path)")
    if resume and config.run.dir is None:
        raise ConfigError("--resume needs the run to go on with: set run.dir=FOLDER")
    inputs = check_inputs(config)
    run_dir = Path(config.run.dir) if config.run.dir else default_run_dir(config.run.name)
    with RunFolder.open(run_dir, name=config.run.name, resume=resume) as folder:
        if not resume:
            folder.write_config(resolved_yaml(config))
        try:
            return run_on(config, folder, lambda runtime: _train(config, inputs, folder, runtime, resume, listener))
        except OSError as error:  # a file that no layer below has a name for
            raise StoreError(
                f"run folder {folder.path}: {error}; check disk space and permissions, then go on with --resume"
            ) from error


async def _train(
    config: RootConfig,
    inputs: CheckedInputs,
    folder: RunFolder,
    runtime: Runtime,
    resume: bool,
    listener: ProgressListener | None,
) -> TrainResult:
    listener = listener or SilentListener()
    memory = PeakMemory()
    start_s = runtime.clock.now_s()
    store = await open_store(config, folder.store_path, runtime)
    parts = None
    try:
        start = first_state(config)
        if resume:
            start = await resumed_state(config, inputs, folder, runtime, store, tell=listener.on_message)
        await store.declare(policy_columns(config))
        parts = await build_parts(
            config,
            inputs,
            folder,
            runtime,
            first_step=start.policy_version + len(start.commits),
            store=store,
            listener=listener,
            # Only then: a resume that was refused must leave the run's own configuration.
            on_opened=lambda: folder.write_config(resolved_yaml(kept_options(config, folder) if resume else config)),
            on_baseline=lambda result: write_baseline(folder, inputs, result),
        )
        orchestrator = Orchestrator(parts, start)
        loop = asyncio.get_running_loop()
        with (
            memory.watching(period_s=MEMORY_SAMPLE_S),
            stop_signals(lambda name: loop.call_soon_threadsafe(orchestrator.request_stop, name)),
        ):
            result = await orchestrator.run()
        if needs_model(config) and result.policy_version > 0:
            await _export(config, result, folder, runtime)
    finally:
        if parts is not None:
            parts.close()
        await store.close()
    duration_s = runtime.clock.now_s() - start_s
    summary = _summary(config, result, memory, duration_s)
    folder.write_summary(summary)
    listener.on_end(_run_summary(config, folder, result, duration_s))
    return TrainResult(run_dir=folder.path, summary=summary, stopped_by=result.stopped_by)


async def _export(config: RootConfig, result: RunResult, folder: RunFolder, runtime: Runtime) -> None:
    """Write each policy's newest weights as a model folder."""
    for policy, update in result.updates.items():
        source = Path(model_folder(config, policy))
        weights = runtime.objects.packed(update.weights_key)
        await runtime.call(export_model, weights, source, folder.export_path / policy)


def _summary(config: RootConfig, result: RunResult, memory: PeakMemory, duration_s: float) -> dict[str, Any]:
    return {
        "name": config.run.name,
        "steps": result.policy_version,
        "wall_s": duration_s,
        "stopped_by": result.stopped_by,
        "policies": policy_summary(result.digests_before, result.updates),
        "eval": evaluation_summary(result.before, result.after),
        "peak_pss_bytes": memory.peak_pss_bytes,
    }


def _run_summary(config: RootConfig, folder: RunFolder, result: RunResult, duration_s: float) -> RunSummary:
    files = {"summary": str(folder.path / "summary.json"), "metrics": str(folder.metrics_path)}
    if folder.export_path.exists():
        files["trained models"] = str(folder.export_path)
    if result.checkpoint is not None:
        files["checkpoint"] = str(result.checkpoint)
    return RunSummary(
        name=config.run.name,
        run_dir=str(folder.path),
        policy_version=result.policy_version,
        num_steps=config.pipeline.num_steps,
        duration_s=duration_s,
        before=None if result.before is None else evaluation_report(result.before),
        after=None if result.after is None else evaluation_report(result.after),
        stopped_by=result.stopped_by,
        files=files,
    )
