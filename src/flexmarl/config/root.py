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

    mode: Literal["serial", "strict", "one_step_off", "bounded_async"] = "strict"
    """`strict`: backward starts when a group closes, the update waits for the whole step. `serial`: backward starts
    when the whole step has been generated; the reference. `one_step_off`: a step is generated while the one before it
    trains, by weights that are one version old. `bounded_async`: rollouts run up to `max_staleness` versions ahead."""
    max_staleness: int | None = Field(default=None, ge=1)
    """Mode bounded_async, and needed by it: no trained token is older than so many versions."""
    num_steps: int = Field(ge=1)
    queries_per_step: int = Field(default=8, ge=1)
    trajectories_per_query: int = Field(default=16, ge=1)
    """Size of a query's group."""
    max_extensions: int = Field(default=0, ge=0)
    """When all rewards in each group of a query are equal, so that nothing can be learned from it, run as many further
    trajectories of the query, at most so often (dynamic sampling)."""


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
    def _check_updates(self) -> Self:
        mode = self.pipeline.mode
        for name in self.policies:
            algorithm = self.algorithm_of(name)
            num_updates = algorithm.num_updates
            updates = f"algorithm.num_epochs={algorithm.num_epochs}, num_minibatches={algorithm.num_minibatches}"
            if mode == "strict" and num_updates > 1:
                raise ValueError(
                    f"policy {name}: {updates} with pipeline.mode=strict, which makes one update per step and trains "
                    "while rollouts still run: set both to 1, or pipeline.mode to serial, one_step_off or bounded_async"
                )
            if algorithm.correction == "decoupled_ppo" and num_updates == 1:
                raise ValueError(
                    f"policy {name}: algorithm.correction=decoupled_ppo has no effect with {updates}: one update per "
                    "version has no other policy to be clipped against; use truncated_is, or raise one of them"
                )
            if algorithm.correction == "truncated_is" and num_updates > 1:
                raise ValueError(
                    f"policy {name}: algorithm.correction=truncated_is with {updates}: with several updates the same "
                    "weight goes with PPO's ratio against the policy before the first one: give decoupled_ppo"
                )
            if algorithm.kl_coef == 0 and algorithm.reference_model is not None:
                raise ValueError(
                    f"policy {name}: algorithm.reference_model={algorithm.reference_model} has no effect with "
                    "algorithm.kl_coef=0: set kl_coef, or remove reference_model"
                )
            column = algorithm.weight_column
            if column is not None and self.store.columns.get(column) not in ("int", "float"):
                raise ValueError(
                    f"policy {name}: algorithm.weight_column={column}, but store.columns has "
                    f"{column}: {self.store.columns.get(column, 'nothing')}; declare it there as float"
                )
            optimizer = self.optimizer_of(name)
            if (optimizer.schedule == "constant") != (optimizer.decay_steps is None):
                raise ValueError(
                    f"policy {name}: optimizer.schedule={optimizer.schedule} with "
                    f"optimizer.decay_steps={optimizer.decay_steps}: the second is needed by, and only by, linear and "
                    "cosine"
                )
            if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
                raise ValueError(
                    f"policy {name}: optimizer.decay_steps={optimizer.decay_steps} with optimizer.warmup_steps="
                    f"{optimizer.warmup_steps}: the first counts the updates of the warm-up too: raise it"
                )
            if optimizer.schedule == "constant" and optimizer.min_lr_frac > 0:
                raise ValueError(
                    f"policy {name}: optimizer.min_lr_frac={optimizer.min_lr_frac} has no effect with "
                    "optimizer.schedule=constant: set schedule and decay_steps, or remove it"
                )
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.workflow.num_workers > 0 and self.workflow.path.startswith("__main__:"):
            raise ValueError(
                f"workflow.path={self.workflow.path} with workflow.num_workers={self.workflow.num_workers}: other "
                "processes cannot import __main__; give file.py:function, or num_workers=0"
            )
        return self

    @model_validator(mode="after")
    def _check_pipeline(self) -> Self:
        pipeline = self.pipeline
        if (pipeline.mode == "bounded_async") != (pipeline.max_staleness is not None):
            raise ValueError(
                f"pipeline.mode={pipeline.mode} with pipeline.max_staleness={pipeline.max_staleness}: the second is "
                "needed by, and only by, mode bounded_async"
            )
        if self.rollout.on_publish == "continue" and pipeline.mode != "bounded_async":
            raise ValueError(
                f"rollout.on_publish=continue has no effect with pipeline.mode={pipeline.mode}, which publishes only "
                "when no request is in flight: remove it, or set pipeline.mode=bounded_async"
            )
        if self.rollout.deterministic and pipeline.mode == "bounded_async":
            raise ValueError(
                "rollout.deterministic=true with pipeline.mode=bounded_async: tokens then depend on when weights are "
                "published: remove rollout.deterministic, or use another mode"
            )
        if (self.store.kind == "plugin") != (self.store.factory is not None):
            raise ValueError(
                f"store.kind={self.store.kind} with store.factory={self.store.factory}: the second is needed by, and "
                "only by, kind plugin"
            )
        for column in self.store.columns:
            if not column.isidentifier():
                raise ValueError(f"store.columns.{column}: a name is an identifier: letters, digits and _")
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
            if self.rollout.backend.trace is not None:
                raise ValueError(
                    f"rollout.backend.trace={self.rollout.backend.trace} answers in real time, which "
                    "runtime.kind=simulated has not: set runtime.kind=local"
                )
            if self.runtime.inline:
                raise ValueError("runtime.inline=true has no effect with runtime.kind=simulated")
        return self
