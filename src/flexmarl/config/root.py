"""The root of the configuration and its checks across sections."""

from typing import Literal, Self

from pydantic import Field, model_validator

from flexmarl.config.base import FrozenConfig
from flexmarl.config.engines import (
    CheckpointConfig,
    EvalConfig,
    RolloutConfig,
    RuntimeConfig,
    StoreConfig,
    TelemetryConfig,
    TrainingConfig,
)
from flexmarl.config.team import AgentConfig, AlgorithmConfig, DataConfig, OptimizerConfig, PolicyConfig, WorkflowConfig


class RunConfig(FrozenConfig):
    """The run itself."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Letters, digits, `.`, `_` and `-`; part of names of folders and processes."""
    dir: str | None = None
    """Run folder; null makes `runs/<name>-<time>`."""
    seed: int = Field(default=0, ge=0)
    """Every random number of the run derives from it."""


class PipelineConfig(FrozenConfig):
    """The step."""

    mode: Literal["serial", "strict"] = "strict"
    """`strict`: backward starts when a group closes, the update waits for the whole step. `serial`: backward starts
    when the whole step has been generated; the reference."""
    num_steps: int = Field(ge=1)
    queries_per_step: int = Field(default=8, ge=1)
    trajectories_per_query: int = Field(default=16, ge=1)
    """Size of a query's group."""


class RootConfig(FrozenConfig):
    """A run, whole."""

    run: RunConfig = RunConfig()
    data: DataConfig
    workflow: WorkflowConfig
    policies: dict[str, PolicyConfig] = Field(min_length=1)
    agents: dict[str, AgentConfig] = Field(min_length=1)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    pipeline: PipelineConfig
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()
    store: StoreConfig = StoreConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    eval: EvalConfig = EvalConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def algorithm_of(self, policy: str) -> AlgorithmConfig:
        """Return the algorithm settings of a policy."""
        return self.policies[policy].algorithm or self.algorithm

    def optimizer_of(self, policy: str) -> OptimizerConfig:
        """Return the optimizer settings of a policy."""
        return self.policies[policy].optimizer or self.optimizer

    @model_validator(mode="after")
    def _check_agents(self) -> Self:
        for name, agent in self.agents.items():
            if agent.policy not in self.policies:
                known = ", ".join(sorted(self.policies))
                raise ValueError(f"agents.{name}.policy is {agent.policy!r}, but policies has only: {known}")
        bound = {agent.policy for agent in self.agents.values()}
        if unbound := sorted(set(self.policies) - bound):
            raise ValueError(
                f"policies.{unbound[0]} is bound to no agent: set agents.<name>.policy={unbound[0]}, or remove it"
            )
        for section, names in (("agents", self.agents), ("policies", self.policies)):
            for name in names:
                if not name.replace("_", "").replace("-", "").isalnum():
                    raise ValueError(f"{section}.{name}: a name has only letters, digits, - and _")
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.rollout.top_p != 1.0:
            raise ValueError(
                f"rollout.top_p={self.rollout.top_p}: training needs rollout.top_p=1, since log-probs of a cut "
                "distribution are not those the gradient is taken of"
            )
        if self.rollout.top_k is not None:
            raise ValueError(f"rollout.top_k={self.rollout.top_k}: training needs rollout.top_k=null")
        if self.rollout.deterministic and self.rollout.backend.kind == "scripted":
            raise ValueError(
                "rollout.deterministic=true has no effect with rollout.backend.kind=scripted, which is always "
                "deterministic: remove rollout.deterministic"
            )
        if self.rollout.ignore_stop:
            for name in self.policies:
                if self.algorithm_of(name).truncated == "mask":
                    raise ValueError(
                        "rollout.ignore_stop=true ends every turn at its limit, and algorithm.truncated=mask would "
                        f"mask them all (policy {name}): set algorithm.truncated=train"
                    )
        return self

    @model_validator(mode="after")
    def _check_algorithms(self) -> Self:
        for name in self.policies:
            algorithm = self.algorithm_of(name)
            if (algorithm.normaliser == "constant") != (algorithm.constant_tokens is not None):
                raise ValueError(
                    f"policy {name}: algorithm.normaliser={algorithm.normaliser} with "
                    f"algorithm.constant_tokens={algorithm.constant_tokens}: the second is needed by, and only by, "
                    "normaliser constant"
                )
        if self.pipeline.trajectories_per_query == 1:
            for name in self.policies:
                if self.algorithm_of(name).group_key != "query":
                    raise ValueError(
                        "pipeline.trajectories_per_query=1 makes groups of one, which GRPO masks "
                        f"(policy {name}): set it to 2 or more"
                    )
        return self

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        if (self.data.source is None) == (self.data.train_file is None):
            raise ValueError("set exactly one of data.source and data.train_file")
        evaluates = self.eval.at_ends or self.eval.every is not None
        if evaluates and self.data.source is None and self.data.held_out_file is None:
            raise ValueError(
                "evaluation is on but data.held_out_file is not set: set it, or eval.at_ends=false and eval.every=null"
            )
        return self

    @model_validator(mode="after")
    def _check_runtime(self) -> Self:
        if self.runtime.kind == "simulated":
            if self.rollout.backend.kind != "scripted" or self.training.backend.kind != "scripted":
                raise ValueError(
                    f"runtime.kind=simulated needs rollout.backend.kind=scripted (is {self.rollout.backend.kind}) and "
                    f"training.backend.kind=scripted (is {self.training.backend.kind})"
                )
            if self.runtime.inline:
                raise ValueError("runtime.inline=true has no effect with runtime.kind=simulated")
        return self
