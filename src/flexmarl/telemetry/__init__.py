"""What a run tells: the event log, metrics, the run folder and its progress. Start with `run_folder.py`."""

from flexmarl.telemetry.event_log import EventLog, LoggedEvent, read_events
from flexmarl.telemetry.memory import PeakMemory, process_tree, pss_bytes
from flexmarl.telemetry.metrics_log import MetricsLog, read_metrics
from flexmarl.telemetry.progress import (
    EvaluationReport,
    PolicyQueue,
    ProgressListener,
    RunSummary,
    SilentListener,
    StepReport,
)
from flexmarl.telemetry.run_folder import RunFolder, default_run_dir
from flexmarl.telemetry.signals import stop_signals
from flexmarl.telemetry.trackers import TrackerGroup, check_trackers, open_trackers

__all__ = [
    "EvaluationReport",
    "EventLog",
    "LoggedEvent",
    "MetricsLog",
    "PeakMemory",
    "PolicyQueue",
    "ProgressListener",
    "RunFolder",
    "RunSummary",
    "SilentListener",
    "StepReport",
    "TrackerGroup",
    "check_trackers",
    "default_run_dir",
    "open_trackers",
    "process_tree",
    "pss_bytes",
    "read_events",
    "read_metrics",
    "stop_signals",
]
