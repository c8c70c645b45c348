"""`flexmarl.evaluate`: success on held-out queries of start models, or of a run's newest checkpoint."""

import asyncio
import tempfile
from pathlib import Path

from flexmarl.api.build import CheckedInputs, build_parts, check_inputs, run_on
from flexmarl.api.resume import first_state, load_checkpoint
from flexmarl.config import RootConfig, TelemetryConfig
from flexmarl.core.errors import BackendError, ConfigError
from flexmarl.core.protocols import Runtime
from flexmarl.orchestrator.reports import evaluation_report
from flexmarl.orchestrator.run import Orchestrator
from flexmarl.store import SqliteStore
from flexmarl.telemetry import (
    EvaluationReport,
    ProgressListener,
    RunFolder,
    SilentListener,
    stop_signals,
)


def evaluate(
    config: RootConfig, *, run_dir: Path | None = None, listener: ProgressListener | None = None
) -> EvaluationReport:
    """Evaluate at one version and change nothing: neither a run folder nor a checkpoint is written.

    Args:
        config: What to evaluate; its `eval` section says how.
        run_dir: Take the newest checkpoint of this run; None takes the models that the configuration starts from.
        listener: Told of the progress.

    Raises:
        ConfigError: an input is wrong.
        FlexMARLError: the evaluation could not be run.
    """
    if not isinstance(config, RootConfig):
        raise ConfigError(f"evaluate() takes a RootConfig, got {config!r:.80}: read it with flexmarl.load_config(path)")
    if not config.eval.at_ends:
        raise ConfigError("eval.at_ends=false switches this evaluation off: add eval.at_ends=true")
    config = config.model_copy(update={"telemetry": TelemetryConfig()})
    inputs = check_inputs(config)
    with (
        tempfile.TemporaryDirectory(prefix="flexmarl-eval-") as scratch,
        RunFolder.open(Path(scratch) / "run", name=config.run.name) as folder,
    ):
        return run_on(config, folder, lambda runtime: _evaluate(config, inputs, folder, runtime, run_dir, listener))


async def _evaluate(
    config: RootConfig,
    inputs: CheckedInputs,
    folder: RunFolder,
    runtime: Runtime,
    run_dir: Path | None,
    listener: ProgressListener | None,
) -> EvaluationReport:
    store = await SqliteStore.open(None, runtime.call)
    parts = None
    try:
        loaded = None if run_dir is None else await load_checkpoint(config, inputs, run_dir / "checkpoints", runtime)
        parts = await build_parts(
            config,
            inputs,
            folder,
            runtime,
            first_step=0,
            store=store,
            listener=listener or SilentListener(),
            on_opened=lambda: None,
            on_baseline=lambda _: None,
        )
        orchestrator = Orchestrator(parts, loaded or first_state(config), is_evaluation_only=True)
        loop = asyncio.get_running_loop()
        with stop_signals(lambda name: loop.call_soon_threadsafe(orchestrator.request_stop, name)):
            result = await orchestrator.run()
    finally:
        if parts is not None:
            parts.close()
        await store.close()
    if result.stopped_by:
        raise BackendError(f"{result.stopped_by} ended the evaluation")
    if result.after is None:
        raise BackendError(f"the evaluation failed: {result.evaluation_error}")
    return evaluation_report(result.after)
