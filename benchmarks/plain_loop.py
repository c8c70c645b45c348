"""The peer job as a plain serial loop over transformers: one side of `end_to_end.py`, in its own process.

Per step and agent: one `generate` over all 64 prompts, rewards, then one forward and backward over the batch (GRPO:
advantages scaled by the group's standard deviation, token mean, gradient norm clipped at 1) and one AdamW step.

Usage: plain_loop.py FOLDER_OF_FIRST_MODEL FOLDER_OF_SECOND_MODEL PROMPTS_JSON (see `peer_job.serve`)
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peer_job import LEARNING_RATE, NUM_NEW_TOKENS, NUM_QUERIES, NUM_TRAJECTORIES, reward_of, serve
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


class PlainAgent:
    """One agent: its model, optimizer and tokenizer."""

    def __init__(self, folder: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self, prompts: Sequence[str]) -> int:
        """Generate for every prompt NUM_TRAJECTORIES times and train on it; return the number of new tokens."""
        prompt_ids = self._tokenizer(list(prompts), return_tensors="pt", add_special_tokens=False).input_ids
        prompt_ids = prompt_ids.repeat_interleave(NUM_TRAJECTORIES, dim=0)
        with torch.inference_mode():
            ids = self._model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=NUM_NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
        num_new = ids.shape[1] - prompt_ids.shape[1]
        texts = self._tokenizer.batch_decode(ids[:, -num_new:], skip_special_tokens=True)
        # A tensor of inference mode cannot be saved for backward; its clone can.
        self._train(ids.clone(), num_new, torch.tensor([reward_of(text) for text in texts]))
        return int(len(ids) * num_new)

    def _train(self, ids: Tensor, num_new: int, rewards: Tensor) -> None:
        groups = rewards.view(-1, NUM_TRAJECTORIES)
        advantages = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-6)
        logits = self._model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=num_new).logits
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, -num_new:, None]).squeeze(-1)
        ratio = torch.exp(logprobs - logprobs.detach())
        loss = -(ratio * advantages.view(-1, 1)).mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


def run(order: Mapping[str, Any], folders: Sequence[str], prompts: Sequence[str]) -> dict[str, Any]:
    """Run the job from fresh models; return the seconds of each step and what was done."""
    torch.set_num_threads(order["num_threads"])
    torch.manual_seed(order["seed"])
    agents = [PlainAgent(folder) for folder in folders]
    step_s: list[float] = []
    num_tokens = 0
    for step in range(order["num_steps"]):
        if sum(step_s) > order["limit_s"]:
            break
        start_s = time.perf_counter()
        of_step = prompts[step * NUM_QUERIES : (step + 1) * NUM_QUERIES]
        num_tokens += sum(agent.step(of_step) for agent in agents)
        step_s.append(time.perf_counter() - start_s)
    num_samples = len(step_s) * len(agents) * NUM_QUERIES * NUM_TRAJECTORIES
    return {"step_s": step_s, "num_samples": num_samples, "num_tokens": num_tokens}


def main() -> None:
    """Serve."""
    *folders, prompts = sys.argv[1:]
    serve(lambda order: run(order, folders, json.loads(Path(prompts).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
