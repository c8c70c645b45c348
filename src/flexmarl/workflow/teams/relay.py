"""Team `relay`: two agents that need each other to add up a chain of numbers such as "7+5-3".

`reducer` sees the question and carries out its first operation ("12-3"). `finisher` sees only that message and gives
the final answer ("9"): without the message it knows nothing of the question. Each reward judges an agent by what it was
given, so the finisher is not punished for a wrong message, and the team succeeds if both do their part.
"""

import re

from flexmarl.workflow.api import Episode, Outcome, workflow
from flexmarl.workflow.tasks import chain_sum

_CHAIN = re.compile(r"-?\d{1,9}(?:[+-]\d{1,9})+", re.ASCII)
_FIRST_OPERATION = re.compile(r"(-?\d{1,9})([+-]\d{1,9})", re.ASCII)
_TERM = re.compile(r"[+-]?\d{1,9}", re.ASCII)


@workflow
async def relay(episode: Episode) -> Outcome:
    """Answer `episode.query["question"]` in two turns; the query comes from the task `chain_sum`."""
    question = str(episode.query["question"])
    message = await episode.agent("reducer").chat(question)
    answer = await episode.agent("finisher").chat(message.text)
    return Outcome(
        rewards={
            "reducer": reducer_reward(question, message.text),
            "finisher": finisher_reward(message.text, answer.text),
        },
        success=chain_sum.is_correct(episode.query, answer.text),
        metrics={"is_message_malformed": float(evaluate(message.text) is None)},
    )


def reducer_reward(question: str, message: str) -> float:
    """Return 1 if `message` is `question` with its first operation carried out and the rest unchanged, else 0.

    A message of the same value with other numbers ("9-0" for "7+5-3") earns nothing: it would do the finisher's part.
    """
    return float(_compact(message) == reduce_once(question))


def finisher_reward(message: str, answer: str) -> float:
    """Return 1 if `answer` is the value of `message`, right or wrong as that message is, else 0.

    A malformed message gives 0: there was nothing to evaluate.
    """
    value = evaluate(message)
    answer = _compact(answer)
    return float(value is not None and _TERM.fullmatch(answer) is not None and int(answer) == value)


def reduce_once(chain: str) -> str:
    """Return `chain` with its first operation carried out: "7+5-3" gives "12-3", and "12-3" gives "9".

    Raises:
        ValueError: `chain` is not numbers joined by + and -.
    """
    chain = _compact(chain)
    match = _FIRST_OPERATION.match(chain)
    if match is None or _CHAIN.fullmatch(chain) is None:
        raise ValueError(f"expected numbers joined by + and -, such as 7+5-3, got {chain!r}")
    return f"{int(match[1]) + int(match[2])}{chain[match.end() :]}"


def evaluate(chain: str) -> int | None:
    """Return the value of `chain`, or None if it is not at least two numbers joined by + and -."""
    chain = _compact(chain)
    if _CHAIN.fullmatch(chain) is None:
        return None
    return sum(int(term) for term in _TERM.findall(chain))


def _compact(text: str) -> str:
    return text.replace(" ", "")
