"""The torch training backend beside loops that people write: trained tokens per second, one thread.

256 samples of the shipped model, a tenth of them with responses 10 times longer, in one global batch: gradient of all,
then one AdamW update. `padded`: batches in order of arrival, padded to the longest. `sorted`: the same with the samples
sorted by length first. Both loops compute logits at every position and get the batch size that suits them best. Prompt
and response tokens of the samples count, padding does not. The sides alternate within one run.

The second part is the log-probs of one long batch alone, forward and backward, at a large vocabulary: time, and memory
at its peak beyond the inputs, each side in its own process (Linux).

Usage: .venv/bin/python benchmarks/train.py [--json] [--quick]
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Before torch is imported: its thread pools read it once.
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import transformers
from report import parser_of, spread_of, with_setting
from torch import Tensor

from flexmarl.algorithms.losses import TokenTerms, policy_gradient_loss, projected_loss
from flexmarl.config import AlgorithmConfig, OptimizerConfig, TorchTrainingConfig
from flexmarl.core.records import Sample
from flexmarl.core.rng import HashRng
from flexmarl.models import load_causal_lm, resolve_model_folder, shipped_models
from flexmarl.testing.training import MemoryObjectPlane, make_sample
from flexmarl.training.backends.torch import TorchBackend

FACTOR = 10
"""How much longer the long responses are."""
BATCH_SIZES = (8, 16, 32, 64, 128)
LEARNING_RATE = 1e-6
VOCABULARY = 49_152
HIDDEN = 576
RESET_PEAK = "5"
"""What `/proc/self/clear_refs` takes to start the peak of resident memory anew."""


def make_samples(num_samples: int, short: int, vocabulary: int) -> list[Sample]:
    """Return samples with prompts of 8 to 24 tokens; every tenth has a long response. The order is shuffled."""
    rng = HashRng(0)
    lengths = [short * FACTOR if number % 10 == 0 else short // 2 + rng.below(short) for number in range(num_samples)]
    rng.shuffle(lengths)
    return [
        make_sample(
            number,
            prompt=[rng.below(vocabulary) for _ in range(8 + rng.below(17))],
            response=[rng.below(vocabulary) for _ in range(length)],
            advantage=2.0 * rng.random() - 1.0,
        )
        for number, length in enumerate(lengths)
    ]


class Loop:
    """A plain training loop over a transformers model."""

    def __init__(self, folder: Path, *, is_sorted: bool) -> None:
        """Load the model; `is_sorted` sorts the samples by length before they are cut into batches."""
        self._model: Any = load_causal_lm(folder)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)
        self._is_sorted = is_sorted

    def train(self, samples: Sequence[Sample], batch_size: int) -> None:
        """Do one update from all samples."""
        if self._is_sorted:
            samples = sorted(samples, key=lambda sample: len(sample.turn.prompt_tokens + sample.turn.response_tokens))
        num_tokens = sum(len(sample.turn.response_tokens) for sample in samples)
        self._optimizer.zero_grad()
        for start in range(0, len(samples), batch_size):
            loss = self._loss(samples[start : start + batch_size]) / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    def _loss(self, samples: Sequence[Sample]) -> Tensor:
        rows = [[*sample.turn.prompt_tokens, *sample.turn.response_tokens] for sample in samples]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        attention = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        advantages = torch.zeros(ids.shape)
        for row, sample in enumerate(samples):
            start = len(sample.turn.prompt_tokens)
            advantages[row, start : len(rows[row])] = sample.advantage
        logits = self._model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return -(torch.exp(logprobs - logprobs.detach()) * advantages[:, 1:]).sum()


def make_backend(folder: Path) -> TorchBackend:
    """Return the backend with the model loaded."""
    backend = TorchBackend(
        model_folder=folder,
        objects=MemoryObjectPlane(),
        config=TorchTrainingConfig(),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
    )
    backend.load_model()
    return backend


def time_of(run: Callable[[], object]) -> float:
    """Return the seconds that one run takes."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def measure_training(folder: Path, *, is_quick: bool) -> dict[str, Any]:
    """Return medians and spreads of tokens per second for the three sides."""
    num_samples, short, repeats = (64, 16, 3) if is_quick else (256, 24, 5)
    backend, padded, in_order = make_backend(folder), Loop(folder, is_sorted=False), Loop(folder, is_sorted=True)
    samples = make_samples(num_samples, short, 90)
    num_tokens = sum(len(sample.turn.prompt_tokens) + len(sample.turn.response_tokens) for sample in samples)

    def train_backend() -> None:
        backend.update(backend.accumulate(samples).denominators)

    def best_size(loop: Loop) -> int:
        loop.train(samples, BATCH_SIZES[0])
        return min(BATCH_SIZES, key=lambda size: time_of(lambda: loop.train(samples, size)))

    train_backend()
    sizes = {"padded": best_size(padded), "sorted": best_size(in_order)}
    rows = [
        (
            num_tokens / time_of(train_backend),
            num_tokens / time_of(lambda: padded.train(samples, sizes["padded"])),
            num_tokens / time_of(lambda: in_order.train(samples, sizes["sorted"])),
        )
        for _ in range(repeats)
    ]
    names = ("tokens_per_s", "padded_tokens_per_s", "sorted_tokens_per_s")
    spread = {name: spread_of(list(column)) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    config = {"num_samples": num_samples, "short_tokens": short, "num_tokens": num_tokens, "batch_sizes": sizes}
    return {"spread": spread, "config": {**config, "repeats": repeats}}


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss from logits of all tokens at once."""
    logprobs = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, targets[:, None]).squeeze(-1)
    return -(torch.exp(logprobs - logprobs.detach()) * advantages).sum()


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """Return the same as the backend computes it."""
    ones = torch.ones(len(targets))
    terms = TokenTerms(advantages_N=advantages, weights_N=ones, rollout_logprobs_N=torch.zeros(len(targets)))
    return projected_loss(hidden, weight, targets, ones, policy_gradient_loss(terms, AlgorithmConfig())).loss


LOSSES = {"plain_": plain_loss, "": chunked_loss}


def measure_logprob(side: str, num_tokens: int, repeats: int) -> tuple[int, list[float]]:
    """Return the peak of memory beyond the inputs, in bytes, and the seconds of each repeat.

    Runs in a process of its own.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN).requires_grad_()
    weight = (0.05 * torch.randn(VOCABULARY, HIDDEN)).requires_grad_()
    targets, advantages = torch.randint(VOCABULARY, (num_tokens,)), torch.randn(num_tokens)

    def run() -> None:
        hidden.grad = weight.grad = None
        LOSSES[side](hidden, weight, targets, advantages).backward()  # type: ignore[no-untyped-call]

    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    before_bytes = memory_bytes("VmRSS")
    run()
    peak_bytes = memory_bytes("VmHWM") - before_bytes
    return peak_bytes, [time_of(run) for _ in range(repeats)]


def memory_bytes(field: str) -> int:
    """Return a size from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure(*, is_quick: bool) -> dict[str, Any]:
    """Return the result object."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, model_name = model_folder(Path(name))
        training = measure_training(folder, is_quick=is_quick)
    num_tokens, repeats = (512, 1) if is_quick else (4096, 3)
    result: dict[str, Any] = {"benchmark": "train", "unit": "tokens/s, bytes, s"}
    result |= {name: spread["median"] for name, spread in training["spread"].items()}
    result["ratio_to_padded"] = result["tokens_per_s"] / result["padded_tokens_per_s"]
    result["ratio_to_sorted"] = result["tokens_per_s"] / result["sorted_tokens_per_s"]
    for side in LOSSES:
        # One process each: memory that one side has freed must not serve the other.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak_bytes, durations = pool.apply(measure_logprob, (side, num_tokens, repeats))
        result[f"{side}peak_bytes"] = peak_bytes
        result[f"{side}logprob_s"] = statistics.median(durations)
        training["spread"][f"{side}logprob_s"] = spread_of(durations)
    logprob = {"num_tokens": num_tokens, "vocabulary": VOCABULARY, "hidden": HIDDEN, "repeats": repeats}
    config = {"training": training["config"], "logprob": logprob, "model": model_name, "threads": 1}
    return with_setting(result | {"spread": training["spread"]}, config, is_quick=is_quick)


def model_folder(scratch: Path) -> tuple[Path, str]:
    """Return the shipped model's folder, or one of the same size in `scratch`, with its name."""
    if "chain_sum" in shipped_models():
        return resolve_model_folder("shipped:chain_sum"), "shipped:chain_sum"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=103,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(scratch)
    return scratch, "random Llama of the same size"


def main() -> None:
    """Run the benchmark."""
    arguments = parser_of(
        "Training backend beside a padded and a length-sorted loop.", quick="fewer and shorter samples"
    ).parse_args()
    result = measure(is_quick=arguments.quick)
    if arguments.json:
        print(json.dumps(result))
        return
    for metric, spread in result["spread"].items():
        print(f"{metric:22} {spread['median']:10.2f}  [{spread['min']:.2f}, {spread['max']:.2f}]")
    print(f"{'peak_bytes':22} {result['peak_bytes']:10}  plain {result['plain_peak_bytes']}")


if __name__ == "__main__":
    main()
