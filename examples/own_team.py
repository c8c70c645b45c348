"""A team of your own: a function for the data, an async function for the team. The configuration is own_team.yaml.

Two branches of `solver` answer the same sum at the same time; `checker` subtracts one answer from the other, so that
"0" says that they agree. Both agents share one policy: the same weights learn both roles.
"""

import asyncio
from typing import Any

import flexmarl


def load_queries(*, split: str, num_queries: int | None, seed: int) -> list[dict[str, Any]]:
    """Return sums and differences of two digits; a third of them is held out. Their order is fixed, so no seed."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    chosen = [(a, b) for a, b in pairs if ((a + 2 * b) % 3 == 0) == (split == "held_out")]
    queries = [
        {"question": f"{a}{sign}{b}", "answer": a + b if sign == "+" else a - b} for a, b in chosen for sign in "+-"
    ]
    return queries[:num_queries]


@flexmarl.workflow
async def solve_twice(episode: flexmarl.Episode) -> flexmarl.Outcome:
    """Solve the question twice, then let the checker compare."""
    question, answer = episode.query["question"], episode.query["answer"]
    first, second = await asyncio.gather(
        episode.agent("solver", branch=0).chat(question), episode.agent("solver", branch=1).chat(question)
    )
    difference = await episode.agent("checker").chat(f"{first.text}-{second.text}")
    for turn in (first, second):
        turn.reward = float(turn.text == str(answer))
    agree = first.text == second.text
    is_judged = (difference.text == "0") == agree
    return flexmarl.Outcome(
        rewards={"checker": float(is_judged)},
        success=agree and first.text == str(answer),
        metrics={"agree_frac": float(agree)},
    )
