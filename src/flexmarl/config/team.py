"""What is trained: data, workflow, policies, agents, algorithm, optimizer."""

from typing import Any, Literal

from pydantic import Field

from flexmarl.config.base import FrozenConfig


class DataConfig(FrozenConfig):
    """Where queries come from: a Python function (`source`) or JSON-lines files (`train_file`, `held_out_file`)."""

    source: str | None = None
    """`module:function`, called as `function(split=..., num_queries=..., seed=..., **options)` with split `train` or
    `held_out`; returns a list of dicts. For example `flexmarl.workflow.tasks.chain_sum:load_queries`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of `source`."""
    train_file: str | None = None
    """Path of a JSON-lines file, one query (an object) per line."""
    held_out_file: str | None = None
    """The same for evaluation; not needed when evaluation is off."""
    num_train: int | None = Field(default=None, ge=1)
    """Use this many training queries; null uses all."""
    seed: int = 0
    """Of the data set's own choices and of the order of queries."""


class WorkflowConfig(FrozenConfig):
    """The user's team."""

    path: str
    """`module:function` or `file.py:function` of an async function of an Episode."""
    num_workers: int = Field(default=0, ge=0)
    """Processes that run workflows; 0 is one thread of the orchestrator's process."""
    timeout_s: float = Field(default=600.0, gt=0)
    """A trajectory that takes longer fails with reason `timeout`."""
    max_attempts: int = Field(default=3, ge=1)
    """A trajectory whose generation failed or whose worker died is started again so often."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one episode worker without an ended trajectory in between; then the run ends."""
    blocked_loop_s: float = Field(default=1.0, gt=0)
    """Report user code that holds the event loop for longer."""
    dry_run: bool = True
    """Before a model is loaded, run the workflow on a few queries with scripted answers, in a child process and for
    less than half a second, to find fields that rows lack and the like. false: for tools that must not run then."""


class AlgorithmConfig(FrozenConfig):
    """How rewards become gradients: GRPO (group relative policy optimisation)."""

    kind: Literal["grpo"] = "grpo"
    group_key: Literal["agent", "query", "agent_turn"] = "agent"
    """Which rewards are compared: `agent` = one reward per (query, agent) and trajectory; `query` = one per query and
    policy, the mean over its acting agents; `agent_turn` = turns at the same (agent, branch, turn) of a query."""
    advantage_scale: Literal["std", "none", "batch_std"] = "std"
    """Divide by the group's standard deviation; or only subtract the mean; or divide by the standard deviation over all
    trained samples of the policy's step, which can be known only when the step has been generated."""
    normaliser: Literal["token_mean", "sample_mean", "constant"] = "token_mean"
    """What the policy's gradient sum is divided by, once per step: its trained tokens, its trained samples (each sample
    then counts by the mean over its tokens), or `constant_tokens` for each sample."""
    constant_tokens: int | None = Field(default=None, ge=1)
    """Divisor per sample of normaliser `constant`."""
    truncated: Literal["train", "mask"] = "mask"
    """What to do with turns that ran into their token limit."""
    num_epochs: int = Field(default=1, ge=1)
    """How often each sample of a step is used. More than 1 trains after the step's rollouts, within its commit."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per epoch, over parts of the step's samples in seeded order; the version changes once."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """PPO: a ratio below 1 - clip_low gets no gradient from a negative advantage. No effect with one update."""
    clip_high: float = Field(default=0.2, gt=0)
    """PPO: a ratio above 1 + clip_high gets no gradient from a positive advantage. No effect with one update."""
    correction: Literal["none", "truncated_is", "decoupled_ppo"] | None = None
    """How tokens that other weights generated are weighed. `truncated_is`, with one update per step: by pi/mu of the
    trained and the generating policy, at most `correction_cap`. `decoupled_ppo`, with several: the same weight for the
    policy before the first update, beside PPO's clipped ratio against that. null: `none` in serial and strict mode, in
    others the one that fits."""
    correction_cap: float = Field(default=2.0, ge=1)
    """Largest importance weight of a token."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: each token's loss gets the k3 estimate, ref/pi - log(ref/pi) - 1. `reward`: a turn's reward is lowered by
    the sum of log(mu/ref) over its tokens before rewards are compared."""
    reference_model: str | None = None
    """Model folder, or `shipped:NAME`, of the frozen reference; null takes the policy's own `model`."""
    weight_column: str | None = None
    """A number column of `store.columns` that multiplies the advantage of each turn."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates of a step with enough samples; with more than one it trains within its commit."""
        return self.num_epochs * self.num_minibatches


class OptimizerConfig(FrozenConfig):
    """AdamW and its schedule."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=1e-5, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm of a policy after normalisation; null does not clip."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up of the learning rate over so many updates."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling to `min_lr_frac` of the rate over `decay_steps`."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Updates, those of the warm-up included, until the lowest rate is reached; needed by linear and cosine."""
    min_lr_frac: float = Field(default=0.0, ge=0, le=1)
    """Lowest rate, as a share of `learning_rate`."""


class PolicyConfig(FrozenConfig):
    """A named set of weights."""

    model: str
    """A Hugging Face model folder, or `shipped:NAME` for a model inside the package (`shipped:chain_sum`)."""
    role: Literal["actor"] = "actor"
    algorithm: AlgorithmConfig | None = None
    """Replaces the `algorithm` section for this policy."""
    optimizer: OptimizerConfig | None = None
    """Replaces the `optimizer` section for this policy."""
    num_instances: int = Field(default=1, ge=1)
    """Inference instances that serve it."""


class AgentConfig(FrozenConfig):
    """A named role in the workflow."""

    policy: str
    """Name of the policy whose weights it uses; several agents may share one."""
    system_prompt: str | None = None
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Replaces `rollout.max_new_tokens`."""
    temperature: float | None = Field(default=None, gt=0)
    """Replaces `rollout.temperature`."""
