"""AdamW over a policy's flat parameters: one update from an unnormalised gradient sum.

The optimizer is torch's own, on one flat parameter, with its moments and its step lying in the state arena. Being
elementwise it gives the bits that it gives tensor by tensor (a test compares), and `fused` makes it one pass.
"""

import math

import torch
from torch import Tensor

from flexmarl.config import OptimizerConfig
from flexmarl.core.errors import BackendError

NORM_ROW = 256
"""Elements whose squares are summed in the gradient's own precision: one long float32 sum loses three digits."""
CLIP_EPS = 1e-6
"""Added to the norm that clips, as `torch.nn.utils.clip_grad_norm_` does."""


class FlatAdamW:
    """AdamW with a schedule. All state lives in tensors of the caller, so moving them moves the optimizer."""

    def __init__(
        self, config: OptimizerConfig, *, parameters_E: Tensor, exp_avg_E: Tensor, exp_avg_sq_E: Tensor, step: Tensor
    ) -> None:
        """Update `parameters_E` in place; `step` is a float32 scalar, the number of updates done."""
        self._config = config
        self._step = step
        self._parameters_E = torch.nn.Parameter(parameters_E)
        self._optimizer = torch.optim.AdamW(
            [self._parameters_E],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._optimizer.state[self._parameters_E] = {"step": step, "exp_avg": exp_avg_E, "exp_avg_sq": exp_avg_sq_E}

    def update(self, gradient_E: Tensor) -> tuple[float, float]:
        """Clip the normalised gradient in place and apply it; return its norm before clipping and the learning rate.

        Raises:
            BackendError: the gradient is not finite, and nothing was touched; or the new parameters are not, and the
                process must end: the state on the object plane is still that before the update.
        """
        norm = global_norm(gradient_E)
        if not math.isfinite(norm):
            raise BackendError(
                f"the gradient norm is {norm}: a loss overflowed or the weights have diverged; no update"
            )
        limit = self._config.max_grad_norm
        if limit is not None and norm + CLIP_EPS > limit:
            gradient_E.mul_(limit / (norm + CLIP_EPS))
        rate = learning_rate(self._config, num_updates=int(self._step.item()))
        self._optimizer.param_groups[0]["lr"] = rate
        self._parameters_E.grad = gradient_E
        self._optimizer.step()
        self._parameters_E.grad = None
        if not torch.isfinite(self._parameters_E).all():
            raise BackendError(
                f"the update made weights that are not finite (learning rate {rate:g}, weight decay "
                f"{self._config.weight_decay:g}, gradient norm {norm:g}): lower optimizer.learning_rate"
            )
        return norm, rate


def learning_rate(config: OptimizerConfig, *, num_updates: int) -> float:
    """Return the learning rate of the update that follows `num_updates` others.

    During the warm-up it rises to the full rate, which the last of `warmup_steps` updates has; the first has a share of
    it, never zero. Then it falls to `min_lr_frac` of the full rate, by a line or half a cosine, and is there after
    `decay_steps` updates.
    """
    if num_updates < config.warmup_steps:
        return config.learning_rate * (num_updates + 1) / config.warmup_steps
    if config.schedule == "constant" or config.decay_steps is None:
        return config.learning_rate
    progress = (num_updates - config.warmup_steps) / max(config.decay_steps - config.warmup_steps, 1)
    done = min(progress, 1.0)
    remaining = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (config.min_lr_frac + (1.0 - config.min_lr_frac) * remaining)


def global_norm(values_E: Tensor) -> float:
    """Return the Euclidean norm, with squares summed in rows and rows in float64."""
    whole = values_E.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(values_E[:whole].view(-1, NORM_ROW), dim=1)
    rest = torch.linalg.vector_norm(values_E[whole:])
    return math.hypot(torch.linalg.vector_norm(rows.double()).item(), rest.item())
