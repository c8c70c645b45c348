"""Typed configuration: one YAML, dotted overrides, every key checked. Start with `root.py`."""

from flexmarl.config.engines import (
    CheckpointConfig,
    EvalConfig,
    RolloutConfig,
    RuntimeConfig,
    ScriptedRolloutConfig,
    ScriptedTrainingConfig,
    StoreConfig,
    TelemetryConfig,
    TorchTrainingConfig,
    TrainingConfig,
    TransformersRolloutConfig,
)
from flexmarl.config.load import load_config, parse_config, resolved_yaml
from flexmarl.config.root import RootConfig
from flexmarl.config.team import AgentConfig, AlgorithmConfig, DataConfig, OptimizerConfig, PolicyConfig, WorkflowConfig

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RolloutConfig",
    "RootConfig",
    "RuntimeConfig",
    "ScriptedRolloutConfig",
    "ScriptedTrainingConfig",
    "StoreConfig",
    "TelemetryConfig",
    "TorchTrainingConfig",
    "TrainingConfig",
    "TransformersRolloutConfig",
    "WorkflowConfig",
    "load_config",
    "parse_config",
    "resolved_yaml",
]
