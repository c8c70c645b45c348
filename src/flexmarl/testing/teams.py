"""A team for scripted runs: two agents, a number of turns that varies, rewards that follow from the texts alone.

A query may hold the trajectory up, so that a test can act at a known moment: with a `gate`, a path, each of its
trajectories makes the file `<gate>.waiting` after the first turn and goes on when the file `<gate>` exists.
"""

import asyncio
from pathlib import Path
from typing import Any

from flexmarl.workflow import Episode, Outcome, workflow

_LOOK_S = 0.005


def load_queries(
    *,
    split: str,
    num_queries: int | None,
    seed: int,
    gate: str | None = None,
    gated_query: int = 0,
    gated_split: str = "train",
) -> list[dict[str, Any]]:
    """Return numbered questions; number `gated_query` of `gated_split` holds its trajectories up at `gate`."""
    queries: list[dict[str, Any]] = [
        {"question": f"{split} {seed}: {number}+{number * 7}"} for number in range(num_queries or 12)
    ]
    if gate is not None and split == gated_split:
        queries[gated_query]["gate"] = gate
    return queries


@workflow
async def pair(episode: Episode) -> Outcome:
    """Let `writer` answer, `judge` comment and, in half of the trajectories, `writer` answer again."""
    first = await episode.agent("writer").chat(str(episode.query["question"]))
    if gate := episode.query.get("gate"):
        await _wait_at(Path(str(gate)))
    comment = await episode.agent("judge").chat(first.text)
    last = first
    if episode.rng.random() < 0.5:
        last = await episode.agent("writer").chat(comment.text)
    return Outcome(
        rewards={"writer": float(len(last.text) % 4), "judge": float(len(comment.text) % 3)},
        success=len(last.text) % 2 == 0,
    )


async def _wait_at(gate: Path) -> None:
    gate.with_name(f"{gate.name}.waiting").touch()
    while not gate.exists():  # noqa: ASYNC110, ASYNC240 (the test that makes the file is another process)
        await asyncio.sleep(_LOOK_S)
