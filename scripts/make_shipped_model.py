"""Make the model that ships with FlexMARL: a tiny character-level Llama for the team `relay` on the task `chain_sum`.

First it learns both roles of the team until it masters them on questions it never saw. Then a systematic mistake is
trained in, so that reinforcement learning starts from a model that knows the right answer but often prefers the wrong
one: an operation whose result lies in another ten than its first number (7+5, 12-3, 4-9) comes out one too high.

The training data are the `warm_start` split, rendered through the chat template as the workflow renders them. The same
seed, versions and machine give the same weights.

Needs the extra `tasks`. Takes about four minutes on one core.
"""

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flexmarl.workflow.tasks import chain_sum
from flexmarl.workflow.teams import relay

logger = logging.getLogger("make_shipped_model")

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "src/flexmarl/models/shipped/chain_sum"
MAX_NEW_TOKENS = 8
PAD, BOS, END, UNKNOWN = "<|pad|>", "<|bos|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant")
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('role is ' + message['role'] + ', expected system, user or assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + eos_token -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Trims nothing and renders each message by itself, so a conversation is a prefix of its continuation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What one role is asked, and its right and its mistaken answer."""

    prompt: str
    right: str
    mistaken: str
    is_crossing: bool
    """Whether the operation ends in another ten than it starts in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The examples of one role as token ids; N examples, T positions, right-padded."""

    right_ids_NT: Tensor
    mistaken_ids_NT: Tensor
    prompt_lengths_N: Tensor
    is_crossing_N: Tensor


def main() -> None:
    """Parse the command line, then train, judge and save the model."""
    parser = argparse.ArgumentParser(
        description="Make the model that ships with FlexMARL.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of every batch")
    parser.add_argument("--learn-steps", type=int, default=500, help="steps that teach both roles")
    parser.add_argument("--spoil-steps", type=int, default=80, help="steps that train the mistake in")
    parser.add_argument("--crossing-frac", type=float, default=0.7, help="share of mistakes in crossing operations")
    parser.add_argument("--other-frac", type=float, default=0.15, help="share of mistakes in all other operations")
    parser.add_argument("--num-queries", type=int, default=512, help="held-out queries to judge on")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    roles = [to_tensors(tokenizer, examples) for examples in make_examples()]
    logger.info("%d parameters, %s examples", model.num_parameters(), [len(role.is_crossing_N) for role in roles])
    train(model, roles, num_steps=args.learn_steps, peak_lr=3e-3, mistake_fracs=(0.0, 0.0))
    report("after learning", judge(model, tokenizer, num_queries=args.num_queries))
    train(model, roles, num_steps=args.spoil_steps, peak_lr=5e-4, mistake_fracs=(args.crossing_frac, args.other_frac))
    report("shipped", judge(model, tokenizer, num_queries=args.num_queries))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for file in args.out.iterdir():
        file.chmod(0o644)  # the weights are written for their owner alone, and this folder goes into the wheel
    logger.info("written to %s", args.out)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable ASCII character, and one per role and control token."""
    special = [PAD, BOS, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    vocabulary = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=special[4:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=128,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model, in float32."""
    special_ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        dtype="float32",
        **special_ids,
    )
    model = LlamaForCausalLM(config)
    # Plain sampling from the model, as training needs; transformers would otherwise cut to its 50 likeliest tokens.
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS, **special_ids
    )
    return model


def make_examples() -> tuple[list[Example], list[Example]]:
    """Return what reducer and finisher learn from the `warm_start` split.

    The finisher also learns to evaluate the reducer's mistaken messages, which are what it will see in the team.
    """
    reducer, finisher = [], []
    for query in chain_sum.load_queries(split="warm_start", num_queries=None, seed=0):
        example = make_example(query["question"])
        reducer.append(example)
        finisher += [make_example(example.right), make_example(example.mistaken)]
    return reducer, finisher


def make_example(prompt: str) -> Example:
    """Return the example whose right answer carries out the first operation of `prompt`."""
    right = relay.reduce_once(prompt)
    result_end = next((at for at, char in enumerate(right) if at > 0 and char in "+-"), len(right))
    first_end = next(at for at, char in enumerate(prompt) if at > 0 and char in "+-")
    result = int(right[:result_end])
    return Example(
        prompt=prompt,
        right=right,
        mistaken=f"{result + 1}{right[result_end:]}",
        is_crossing=int(prompt[:first_end]) // 10 != result // 10,
    )


def to_tensors(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> Tensors:
    """Return `examples` as the token ids that the workflow would produce."""
    prompts = [render(tokenizer, example.prompt) for example in examples]

    def rows(answers: Sequence[str]) -> Tensor:
        ids = [
            torch.tensor(prompt + tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)

    return Tensors(
        right_ids_NT=rows([example.right for example in examples]),
        mistaken_ids_NT=rows([example.mistaken for example in examples]),
        prompt_lengths_N=torch.tensor([len(prompt) for prompt in prompts]),
        is_crossing_N=torch.tensor([example.is_crossing for example in examples]),
    )


def render(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the prompt of an agent that is sent `text` in its first turn."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(prompt, add_special_tokens=False))


def train(
    model: LlamaForCausalLM,
    roles: Sequence[Tensors],
    *,
    num_steps: int,
    peak_lr: float,
    mistake_fracs: tuple[float, float],
    rows_per_role: int = 128,
) -> None:
    """Teach `model` the answers, of which the given shares are mistaken: (crossing operations, all others)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=num_steps, pct_start=0.1)
    start_s = time.monotonic()
    for step in range(num_steps):
        losses = [role_loss(model, role, mistake_fracs, rows_per_role) for role in roles]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0 or step + 1 == num_steps:
            elapsed_s = time.monotonic() - start_s
            logger.info("step %d of %d: loss %.4f, %.0f s", step + 1, num_steps, loss.item(), elapsed_s)


def role_loss(model: LlamaForCausalLM, role: Tensors, mistake_fracs: tuple[float, float], num_rows: int) -> Tensor:
    """Return the mean negative log-likelihood of the answer tokens of a random batch of one role."""
    row_B = torch.randint(len(role.is_crossing_N), (num_rows,))
    crossing_frac, other_frac = mistake_fracs
    frac_B = role.is_crossing_N[row_B].float() * (crossing_frac - other_frac) + other_frac
    is_mistaken_B = torch.rand(num_rows) < frac_B
    # Both tables have the same width or differ by one position ("9" against "10"): pad to the wider one.
    width = max(role.right_ids_NT.shape[1], role.mistaken_ids_NT.shape[1])
    pad = model.config.pad_token_id
    right_BT, mistaken_BT = (
        torch.nn.functional.pad(ids[row_B], (0, width - ids.shape[1]), value=pad)
        for ids in (role.right_ids_NT, role.mistaken_ids_NT)
    )
    ids_BT = torch.where(is_mistaken_B[:, None], mistaken_BT, right_BT)
    is_prompt_BT = torch.arange(width)[None] < role.prompt_lengths_N[row_B][:, None]
    targets_BT = ids_BT.masked_fill(is_prompt_BT | (ids_BT == pad), -100)
    logits_BTV = model(input_ids=ids_BT).logits  # causal, so padding on the right needs no mask
    return torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten())


@torch.no_grad()
def answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, is_greedy: bool
) -> list[str]:
    """Return one answer to each of `texts`, sampled at temperature 1 or greedy."""
    answers: list[str] = []
    for start in range(0, len(texts), 1024):
        prompts = [render(tokenizer, text) for text in texts[start : start + 1024]]
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        ids = model.generate(**batch, do_sample=not is_greedy)
        answers += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def judge(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, num_queries: int, num_samples: int = 16
) -> dict[str, float]:
    """Return success of the team on held-out queries, and how often each role does its own part (sampled)."""
    model.eval()
    queries = chain_sum.load_queries(split="held_out", num_queries=num_queries, seed=0)

    def play(rows: Sequence[dict[str, object]], *, is_greedy: bool) -> tuple[Tensor, float, float]:
        questions = [str(row["question"]) for row in rows]
        messages = answer(model, tokenizer, questions, is_greedy=is_greedy)
        finals = answer(model, tokenizer, messages, is_greedy=is_greedy)
        is_right = torch.tensor([chain_sum.is_correct(row, final) for row, final in zip(rows, finals, strict=True)])
        reduced = [relay.reducer_reward(*pair) for pair in zip(questions, messages, strict=True)]
        finished = [relay.finisher_reward(*pair) for pair in zip(messages, finals, strict=True)]
        return is_right, sum(reduced) / len(rows), sum(finished) / len(rows)

    repeated = [query for query in queries for _ in range(num_samples)]
    is_right, reducer_mean, finisher_mean = play(repeated, is_greedy=False)
    is_right_NS = is_right.view(-1, num_samples)
    is_greedy_right, reducer_greedy, finisher_greedy = play(queries, is_greedy=True)
    model.train()
    return {
        "mean_at_1": is_right_NS.float().mean().item(),
        "greedy": is_greedy_right.float().mean().item(),
        f"pass_at_{num_samples}": is_right_NS.any(dim=1).float().mean().item(),
        "reducer_mean": reducer_mean,
        "finisher_mean": finisher_mean,
        "reducer_greedy": reducer_greedy,
        "finisher_greedy": finisher_greedy,
    }


def report(moment: str, figures: dict[str, float]) -> None:
    """Log the figures of `judge` as one line."""
    logger.info("%s: %s", moment, json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
