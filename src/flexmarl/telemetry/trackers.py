"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio. Each is optional, and offline unless told.

A tracker gets the rows of metrics.jsonl under the same keys (`agent/<name>/...`, `policy/<name>/...`). Its failure is
logged once and never stops a run.
"""

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from flexmarl.core.errors import ConfigError

logger = logging.getLogger(__name__)

Row = Mapping[str, float | int | str | None]


class Tracker(Protocol):
    """One experiment tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a step."""
        ...

    def close(self) -> None:
        """Flush and finish."""
        ...


class TrackerGroup:
    """All trackers of a run behind one `log`; what one of them raises is logged, and it is not asked again."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        """Take opened trackers by name."""
        self._trackers = dict(trackers)

    def log(self, step: int, row: Row) -> None:
        """Record the numbers of a row."""
        values = {key: float(value) for key, value in row.items() if isinstance(value, (int, float))}
        self._each(lambda tracker: tracker.log(step, values))

    def close(self) -> None:
        """Finish every tracker."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, use: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                use(tracker)
            except Exception:  # third-party code of any kind; a run must not end for its tracker
                logger.exception("tracker %s failed and is not used any more", name)
                del self._trackers[name]


def check_trackers(names: Sequence[str]) -> None:
    """Look for the packages of trackers, without importing them.

    Raises:
        ConfigError: one is not installed; names the extra.
    """
    for name in names:
        if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
            raise _missing(name, f"no module named {name!r}")


def open_trackers(names: Sequence[str], *, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> TrackerGroup:
    """Open the trackers of `telemetry.trackers`.

    Raises:
        ConfigError: the package of a tracker is not installed (names the extra), or it does not start.
    """
    opened: dict[str, Tracker] = {}
    for name in names:
        try:
            opened[name] = _OPENERS[name](run_dir, run_name, config)
        except Exception as error:  # third-party code of any kind
            TrackerGroup(opened).close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"telemetry.trackers has {name!r}, which does not start: {error!r}; see to its settings, or remove it"
            ) from error
    return TrackerGroup(opened)


def _module(name: str, *, tracker: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(tracker, str(error)) from error


def _missing(tracker: str, reason: str) -> ConfigError:
    return ConfigError(
        f"telemetry.trackers has {tracker!r}, whose package is not installed ({reason}): "
        f"install it with `pip install 'flexmarl[{tracker}]'`, or remove it"
    )


class _TensorBoard:
    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        events = _module("tensorboard.compat.proto.event_pb2", tracker="tensorboard")
        summaries = _module("tensorboard.compat.proto.summary_pb2", tracker="tensorboard")
        writers = _module("tensorboard.summary.writer.event_file_writer", tracker="tensorboard")
        self._make_event = events.Event
        self._make_summary = summaries.Summary
        self._writer = writers.EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        items = [self._make_summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._writer.add_event(self._make_event(step=step, summary=self._make_summary(value=items)))

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        wandb = _module("wandb", tracker="wandb")
        # WANDB_MODE=online is the user's word for sending data out.
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "flexmarl"),
            name=run_name,
            dir=str(run_dir),
            config=dict(config),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        mlflow = _module("mlflow", tracker="mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{run_dir / 'mlflow.db'}")
        mlflow.set_experiment("flexmarl")
        self._mlflow = mlflow
        mlflow.start_run(run_name=run_name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Trackio:
    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))
        self._trackio = _module("trackio", tracker="trackio")
        self._trackio.init(project="flexmarl", name=run_name, config=dict(config), embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


_OPENERS: Mapping[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
    "trackio": _Trackio,
}
