"""How it is trained: rollout, training, store, checkpoint, runtime, evaluation, telemetry."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from flexmarl.config.base import FrozenConfig, kind_when_missing


class TransformersRolloutConfig(FrozenConfig):
    """The embedded engine: continuous batching over a Hugging Face model."""

    kind: Literal["transformers"] = "transformers"
    num_slots: int = Field(default=64, ge=1)
    """Sequences decoded together by one instance; more wait."""
    admit_every: int = Field(default=1, ge=1)
    """Let waiting sequences in every so many decode steps (and whenever the batch is empty)."""


class ScriptedRolloutConfig(FrozenConfig):
    """A deterministic engine without a model, for tests and simulation: tokens follow from the request's seed."""

    kind: Literal["scripted"] = "scripted"
    num_slots: int = Field(default=64, ge=1)
    token_s: float = Field(default=0.0, ge=0)
    """Modelled time of one decode step."""
    prefill_token_s: float = Field(default=0.0, ge=0)
    """Modelled time per prompt token."""
    mean_tokens: float | None = Field(default=None, gt=0)
    """Mean of the geometric number of new tokens; null draws up to the limit uniformly."""
    vocabulary: str = "0123456789+-="
    """Characters drawn from."""
    trace: str | None = None
    """File of recorded completions to answer from, in real time, instead of drawing (`benchmarks/overlap.py`)."""

    @model_validator(mode="after")
    def _check_trace(self) -> Self:
        if self.trace is not None:
            for name in ("token_s", "prefill_token_s", "mean_tokens", "vocabulary"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}={value} has no effect with trace={self.trace}: remove one of the two")
        return self


class RolloutConfig(FrozenConfig):
    """The rollout engine."""

    backend: Annotated[
        TransformersRolloutConfig | ScriptedRolloutConfig,
        Field(discriminator="kind"),
        BeforeValidator(kind_when_missing("transformers")),
    ] = TransformersRolloutConfig()
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)
    """Per turn."""
    ignore_stop: bool = False
    """Generate exactly `max_new_tokens` per turn (benchmarks)."""
    on_publish: Literal["drain", "continue"] = "drain"
    """Mode bounded_async, when new weights are published: `drain` lets an instance finish its requests before it loads
    them; `continue` loads at once, and unfinished requests go on with the new weights (version spans per token)."""
    deterministic: bool = False
    """Let the tokens and log-probs of a turn depend on its request and the weights alone, bit for bit, so that a
    resumed run repeats them: every decode step computes all slots over the whole context, and prompts are read alone.
    Without it, company changes the last bits of log-probs, and once in many tokens the token. Costs time and memory
    for `num_slots` x context. The bits still depend on the machine, the library versions, `num_slots` and
    `runtime.threads_per_process`."""
    inter_query: int | None = Field(default=None, ge=1)
    """Queries in flight; null does not bound them."""
    intra_query: int | None = Field(default=None, ge=1)
    """Trajectories of one query in flight; null does not bound them."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """An instance that has not answered a request by then is taken as hung: it is killed and the request retried."""
    max_retries: int = Field(default=3, ge=0)
    """Further tries of a request, with the same key and seed."""
    max_restarts: int = Field(default=10, ge=0)
    """Restarts of one instance without an answer in between; then the run goes on with the policy's others, or ends."""


class TorchTrainingConfig(FrozenConfig):
    """One process per policy, PyTorch."""

    kind: Literal["torch"] = "torch"
    accumulation: Literal["float", "canonical"] = "float"
    """`float`: micro-batches, float32 sums. `canonical`: one sample at a time on a fixed-point grid, so that no order,
    split or suspension can change a bit; slow, for tests and replay."""


class ScriptedTrainingConfig(FrozenConfig):
    """Deterministic integer arithmetic in place of a model, for tests and simulation."""

    kind: Literal["scripted"] = "scripted"
    token_s: float = Field(default=0.0, ge=0)
    """Modelled time of forward and backward per token."""
    update_s: float = Field(default=0.0, ge=0)
    """Modelled time of an update."""
    num_parameters: int = Field(default=64, ge=1)


class TrainingConfig(FrozenConfig):
    """The training engine."""

    backend: Annotated[
        TorchTrainingConfig | ScriptedTrainingConfig,
        Field(discriminator="kind"),
        BeforeValidator(kind_when_missing("torch")),
    ] = TorchTrainingConfig()
    num_slots: int | None = Field(default=None, ge=1)
    """Process groups that may hold training devices at once; null gives each trained policy its own slot. With fewer
    slots than policies, process groups take turns and their state moves through the object plane."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Cut micro-batches at so many tokens (prompt and response); a longer sample makes a micro-batch of its own."""
    seal_every: int = Field(default=8, ge=1)
    """Seal a policy's gradient cache after so many micro-batches, so that a death repeats no more work than that."""
    micro_batch_timeout_s: float = Field(default=600.0, gt=0)
    """A process group that works longer on one command is killed."""
    max_attempts: int = Field(default=3, ge=1)
    """A micro-batch whose process group died so often stops the run."""


class StoreConfig(FrozenConfig):
    """The experience store."""

    kind: Literal["sqlite", "memory", "plugin"] = "sqlite"
    """`memory` keeps nothing across a crash: for simulated runs. `plugin` takes what `factory` makes."""
    factory: str | None = None
    """Of kind plugin: `module:function`, an async function called as `function(folder, call)` that returns an
    ExperienceStore."""
    columns: dict[str, Literal["int", "float", "bool", "str"]] = Field(default_factory=dict)
    """Further columns of every turn, which workflows fill through `turn.columns`."""
    retention: Literal["covered", "all"] = "covered"
    """Keep the tokens of trained turns until the oldest kept checkpoint covers their step, or for good, so that
    `flexmarl replay` can start at the first step. Keys, rewards and states always stay."""


class CheckpointConfig(FrozenConfig):
    """Checkpoints and resume."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step and Ctrl-C write one too."""
    keep_last: int = Field(default=2, ge=1)
    replay: bool = True
    """true: resume trains the steps after the newest checkpoint again from stored rows, without generation, and goes on
    with the step in flight. false: resume goes back to the newest checkpoint; steps after it run again."""


class RuntimeConfig(FrozenConfig):
    """Where workers run."""

    kind: Literal["local", "simulated"] = "local"
    inline: bool = False
    """Run workers as threads of this process, for debugging."""
    threads_per_process: int = Field(default=1, ge=1)
    """Compute threads of each worker process."""
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    """A worker that sent no heartbeat for so long is killed; heartbeats come from a thread that does no compute."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """A worker must be ready by then."""
    stop_timeout_s: float = Field(default=10.0, gt=0)
    """A worker asked to stop is killed after that."""


class EvalConfig(FrozenConfig):
    """Success on held-out queries, at version boundaries."""

    every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; null evaluates only before and after."""
    at_ends: bool = True
    """Evaluate before the first step and after the last."""
    num_queries: int = Field(default=256, ge=1)
    samples_per_query: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    greedy: bool = True
    """Also run each query once at temperature 0."""
    timeout_s: float = Field(default=600.0, gt=0)
    """An evaluation that takes longer is abandoned and reported; the run goes on."""


class TelemetryConfig(FrozenConfig):
    """What is written beside the results."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers that also get the metrics; each needs the extra of its name. They write into the run folder
    and send nothing out, unless WANDB_MODE or MLFLOW_TRACKING_URI say otherwise."""
    trajectories_per_step: int = Field(default=2, ge=0)
    """Trajectories written to trajectories.jsonl per step."""
