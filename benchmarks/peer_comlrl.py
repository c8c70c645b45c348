"""The peer job in CoMLRL (MAGRPOTrainer): one side of `end_to_end.py`, in an environment that holds the peer.

What makes it the same job: two models, one turn, 16 generations a prompt, temperature 1 without top-p and top-k, no end
token, so that every completion has 48 tokens; a buffer and a batch of 4 prompts, so that an agent updates once every 4
queries; advantages over the standard deviation; no evaluation, no tracker, no progress bar. Its reward is one number
for the team: the sum over the agents.

Usage: peer_comlrl.py FOLDER_OF_FIRST_MODEL FOLDER_OF_SECOND_MODEL PROMPTS_JSON (see `peer_job.serve`)
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from peer_job import LEARNING_RATE, NUM_NEW_TOKENS, NUM_QUERIES, NUM_TRAJECTORIES, reward_of, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

# By name: neither is installed where this file is type-checked.
reinforce: Any = import_module("comlrl.trainers.reinforce")
datasets: Any = import_module("datasets")


def team_reward(first: Sequence[str], second: Sequence[str]) -> list[float]:
    """Return the reward of each pair of completions."""
    return [reward_of(a) + reward_of(b) for a, b in zip(first, second, strict=True)]


def load_model(folder: str) -> Any:
    """Return a model that never stops before its token limit."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id = None
    return model


def make_trainer(folders: Sequence[str], prompts: Sequence[str]) -> Any:
    """Return a trainer over fresh models; an epoch is the whole run."""
    tokenizers: list[Any] = [AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in folders]
    config = reinforce.MAGRPOConfig(
        num_train_epochs=1,
        agent_learning_rate=LEARNING_RATE,
        num_agents=len(folders),
        agent_devices="cpu",
        num_generations=NUM_TRAJECTORIES,
        max_new_tokens=NUM_NEW_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_turns=1,
        eval_interval=0,
        rollout_buffer_size=NUM_QUERIES,
        train_batch_size=NUM_QUERIES,
        advantage_normalization=True,
    )
    return reinforce.MAGRPOTrainer(
        agents=[load_model(folder) for folder in folders],
        num_agents=len(folders),
        tokenizer=tokenizers,
        train_dataset=datasets.Dataset.from_dict({"prompt": list(prompts)}),
        reward_func=team_reward,
        wandb_config=None,
        args=config,
    )


class LimitReachedError(Exception):
    """The limit of the order has passed."""


class Meter:
    """Watches a trainer: when each step ends, and what was really generated and trained."""

    def __init__(self, trainer: Any, *, limit_s: float) -> None:
        self.step_s: list[float] = []
        self.num_samples = 0
        self.num_tokens = 0
        self._num_queries = 0
        self._train_query = trainer._train_step_returns
        self._loss = trainer._compute_loss_with_gradients
        trainer._train_step_returns = self._measured_query
        trainer._compute_loss_with_gradients = self._counted_loss
        self._start_s = time.perf_counter()
        self._limit_s = self._start_s + limit_s

    def _measured_query(self, item: Any, **options: Any) -> None:
        if time.perf_counter() > self._limit_s:
            raise LimitReachedError
        self._train_query(item, **options)
        self._num_queries += 1
        if self._num_queries % NUM_QUERIES == 0:
            now_s = time.perf_counter()
            self.step_s.append(now_s - self._start_s)
            self._start_s = now_s

    def _counted_loss(self, agent: Any, completions: Mapping[str, Any], returns: Sequence[float]) -> Any:
        rows = completions["completion_input_ids"][0]
        self.num_samples += len(rows)
        self.num_tokens += sum(len(row) for row in rows)
        return self._loss(agent, completions, returns)


def run(order: Mapping[str, Any], folders: Sequence[str], prompts: Sequence[str]) -> dict[str, Any]:
    """Run the job from fresh models; return the seconds of each step and what was done."""
    torch.set_num_threads(order["num_threads"])
    torch.manual_seed(order["seed"])
    trainer = make_trainer(folders, prompts[: order["num_steps"] * NUM_QUERIES])
    trainer.verbose = False
    meter = Meter(trainer, limit_s=order["limit_s"])
    with suppress(LimitReachedError):
        trainer.train()
    return {"step_s": meter.step_s, "num_samples": meter.num_samples, "num_tokens": meter.num_tokens}


def main() -> None:
    """Serve."""
    *folders, prompts = sys.argv[1:]
    serve(lambda order: run(order, folders, json.loads(Path(prompts).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
