"""The peer job as a FlexMARL run: the workflow, the configuration, and one run, checked to have done all the work."""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peer_job import (
    AGENTS,
    LEARNING_RATE,
    NUM_NEW_TOKENS,
    NUM_QUERIES,
    NUM_TRAJECTORIES,
    SAMPLES_PER_STEP,
    questions,
    reward_of,
)
from waterfall import mean_waterfall, step_waterfalls

import flexmarl
from flexmarl.config import RootConfig, parse_config
from flexmarl.models import resolve_model_folder
from flexmarl.telemetry import read_metrics


def load_queries(*, split: str, num_queries: int | None, seed: int, num_steps: int) -> list[dict[str, Any]]:
    """Return the questions of the job; there is nothing to split, shuffle or cut."""
    return [{"question": question} for question in questions(num_steps)]


@flexmarl.workflow
async def both_at_once(episode: flexmarl.Episode) -> flexmarl.Outcome:
    """Ask both agents at the same time."""
    turns = await asyncio.gather(*(episode.agent(agent).chat(episode.query["question"]) for agent in AGENTS))
    return flexmarl.Outcome(rewards={agent: reward_of(turn.text) for agent, turn in zip(AGENTS, turns, strict=True)})


def write_models(folder: Path) -> list[Path]:
    """Write a fresh model per agent, of the shipped model's size, into `folder / <agent>`; return these folders.

    Fresh, so that what they write differs within every group and no advantage is 0.
    """
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    from flexmarl.models.load import without_progress_bars

    shipped = resolve_model_folder("shipped:chain_sum")
    folders = []
    for seed, agent in enumerate(AGENTS):
        torch.manual_seed(seed)
        shutil.copytree(shipped, folder / agent)
        with without_progress_bars():
            LlamaForCausalLM(AutoConfig.from_pretrained(shipped)).save_pretrained(folder / agent)
        folders.append(folder / agent)
    return folders


def write_prompts(path: Path, model_folder: Path, num_steps: int) -> None:
    """Write the prompts that `both_at_once` makes, as text, for the sides that have no chat."""
    from transformers import AutoTokenizer

    template: Any = AutoTokenizer.from_pretrained(model_folder, local_files_only=True).apply_chat_template
    conversations = [[{"role": "user", "content": question}] for question in questions(num_steps)]
    prompts = [template(each, tokenize=False, add_generation_prompt=True) for each in conversations]
    path.write_text(json.dumps(prompts), encoding="utf-8")


def make_config(
    folders: Sequence[Path], run_dir: Path, *, num_steps: int, seed: int, setting: Sequence[str]
) -> RootConfig:
    """Return the configuration of the job; `setting` holds overrides of keys that change no result."""
    here = str(Path(__file__).resolve())
    plain = {
        "run": {"name": "peer_job", "dir": str(run_dir), "seed": seed},
        "data": {"source": f"{here}:load_queries", "options": {"num_steps": num_steps}},
        "workflow": {"path": f"{here}:both_at_once"},
        "policies": {agent: {"model": str(folder)} for agent, folder in zip(AGENTS, folders, strict=True)},
        "agents": {agent: {"policy": agent} for agent in AGENTS},
        "algorithm": {"truncated": "train"},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "pipeline": {
            "num_steps": num_steps,
            "queries_per_step": NUM_QUERIES,
            "trajectories_per_query": NUM_TRAJECTORIES,
        },
        "rollout": {"max_new_tokens": NUM_NEW_TOKENS, "ignore_stop": True},
        "eval": {"at_ends": False},
    }
    return parse_config(plain, setting)


def run_team(
    folders: Sequence[Path], run_dir: Path, *, num_steps: int, seed: int, setting: Sequence[str]
) -> dict[str, Any]:
    """Train through the public function; return the seconds of each step but the first, and where they went.

    Raises:
        RuntimeError: a sample was not trained, or a turn has not its 48 tokens.
    """
    result = flexmarl.train(make_config(folders, run_dir, num_steps=num_steps, seed=seed, setting=setting))
    if result.stopped_by is not None:
        # A run takes Ctrl-C as its own end; here it means the end of the benchmark.
        raise SystemExit(f"stopped by {result.stopped_by}")
    rows = read_metrics(run_dir / "metrics.jsonl")
    if len(rows) != num_steps:
        raise RuntimeError(f"{len(rows)} steps were committed, expected {num_steps}")
    for row in rows:
        _check_row(row)
    steps = step_waterfalls(run_dir / "events.jsonl")
    return {"step_s": [step.duration_s for step in steps], "waterfall": mean_waterfall(steps)}


def _check_row(row: Mapping[str, float | int | str | None]) -> None:
    expected = {"rollout/num_tokens": SAMPLES_PER_STEP * NUM_NEW_TOKENS, "rollout/num_failed": 0}
    for agent in AGENTS:
        expected[f"policy/{agent}/num_samples"] = SAMPLES_PER_STEP // len(AGENTS)
        expected[f"policy/{agent}/num_tokens"] = SAMPLES_PER_STEP // len(AGENTS) * NUM_NEW_TOKENS
    for key, value in expected.items():
        if row.get(key) != value:
            raise RuntimeError(f"step {row['step']}: {key} is {row.get(key)}, expected {value}")
    if masked := [key for key in row if "num_masked" in key and row[key]]:
        raise RuntimeError(f"step {row['step']}: samples were masked: {', '.join(masked)}")
