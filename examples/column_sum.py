"""Column addition by a team of two: `units` adds the last digits, `tens` adds the first digits and the carry."""

import flexmarl


def load_queries(*, split: str, num_queries: int | None, seed: int) -> list[dict[str, int]]:
    """Return sums of two numbers with two digits; every third sum is held out."""
    sums = [{"a": a, "b": b} for a in range(10, 100) for b in range(10, 100)]
    chosen = [query for n, query in enumerate(sums) if (n % 3 == 0) == (split == "held_out")]
    chosen.sort(key=lambda query: hash((seed, query["a"], query["b"])))  # mixed, and equal in every run
    return chosen[:num_queries]


@flexmarl.workflow
async def add_columns(episode: flexmarl.Episode) -> flexmarl.Outcome:
    """Add `a` and `b` digit by digit, as on paper."""
    a, b = episode.query["a"], episode.query["b"]

    units = await episode.agent("units").chat(f"{a % 10}+{b % 10}")
    carry = int(len(units.text) == 2)
    tens = await episode.agent("tens").chat(f"{a // 10 + carry}+{b // 10}")

    return flexmarl.Outcome(
        rewards={
            "units": float(units.text == str(a % 10 + b % 10)),
            "tens": float(tens.text == str(a // 10 + carry + b // 10)),
        },
        success=tens.text + units.text[-1:] == str(a + b),
    )
