"""Training throughput of a whole run beside a peer system and a plain loop: the fixed peer job, samples per second.

Two agents with separate weights (0.88M parameters each, float32) answer the same 4 queries 16 times each, exactly 48
tokens a turn, one turn an agent, both at once; reward = distinct characters / 10; AdamW at 1e-5. A sample is a turn,
128 a step, and every one is trained. Three sides do this job in turns, within one run, on all cores of the machine:

* FlexMARL, through `flexmarl.train`, timed from commit to commit;
* `plain_loop.py`, a serial loop over transformers;
* `peer_comlrl.py`, the MAGRPO trainer of CoMLRL, when `--peer-python` names the interpreter of an environment with it.

The last two get the number of torch threads that suits them best. On every side start-up and the first step are left
out. Every side counts what it generated and trained, and the run fails when that is not the job.

Usage: .venv/bin/python benchmarks/end_to_end.py [--json] [--quick] [--peer-python PATH]
       .venv/bin/python benchmarks/end_to_end.py --tune    (compares the settings of GRID)
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Before torch is imported: its thread pools read it once.
os.environ["OMP_NUM_THREADS"] = "1"

from peer_job import AGENTS, NUM_NEW_TOKENS, NUM_STEPS, SAMPLES_PER_STEP, SideProcess, TooSlowError
from peer_team import run_team, write_models, write_prompts
from report import parser_of, spread_of, with_setting
from waterfall import PHASES

HERE = Path(__file__).resolve().parent
SCRIPTS = {"plain": "plain_loop.py", "peer": "peer_comlrl.py"}
THREADS = (1, 2)
TIME_LIMIT_S = 1080.0
"""No further repeat begins when it would end later than this."""

SETTING: tuple[str, ...] = ()
"""The overrides that FlexMARL runs with: none, what a user gets. `--tune` compares others."""
GRID: tuple[tuple[str, ...], ...] = (
    (),
    ("rollout.inter_query=2",),
    ("training.micro_batch_tokens=4096",),
    ("training.micro_batch_tokens=1024",),
    ("pipeline.mode=serial",),
    ("pipeline.mode=serial", "training.micro_batch_tokens=4096"),
    ("pipeline.mode=serial", "training.micro_batch_tokens=1024"),
    ("rollout.backend.num_slots=32",),
)
"""Settings that change the schedule alone, never what is trained."""


class Bench:
    """The sides, on one set of models in one scratch folder."""

    def __init__(self, scratch: Path, stack: ExitStack, *, peer_python: str | None, num_steps: int) -> None:
        """Start loading the other sides while the models are written."""
        self._scratch = scratch
        self._num_steps = num_steps
        self._num_runs = 0
        self._stack = stack
        model_folder, prompts = scratch / "models", scratch / "prompts.json"
        model_folder.mkdir()
        self._arguments = [*(str(model_folder / agent) for agent in AGENTS), str(prompts)]
        self._pythons = {"plain": sys.executable} | ({"peer": peer_python} if peer_python else {})
        self.sides = {name: self._start(name) for name in self._pythons}
        self._folders = write_models(model_folder)
        write_prompts(prompts, self._folders[0], NUM_STEPS)
        for side in self.sides.values():
            side.wait_ready()

    def _start(self, name: str) -> SideProcess:
        log = self._scratch / f"{name}.log"
        return self._stack.enter_context(
            SideProcess(self._pythons[name], HERE / SCRIPTS[name], self._arguments, log=log)
        )

    def run_flexmarl(self, setting: Sequence[str]) -> dict[str, Any]:
        """Return samples per second and the waterfall of one run."""
        self._num_runs += 1
        run_dir = self._scratch / f"run-{self._num_runs}"
        result = run_team(self._folders, run_dir, num_steps=self._num_steps, seed=self._num_runs, setting=setting)
        return {"samples_per_s": rate(result["step_s"]), "waterfall": result["waterfall"]}

    def run_side(self, name: str, *, num_threads: int) -> float:
        """Return samples per second of one run."""
        return rate(self.sides[name].run(num_steps=self._num_steps, num_threads=num_threads, seed=self._num_runs))

    def best_threads(self, name: str) -> tuple[int, dict[str, float]]:
        """Return the number of threads that suits a side, and the samples per second of each."""
        rates: dict[int, float] = {}
        for num_threads in THREADS:
            # A setting that needs three times the seconds of the best for its first step is not the best.
            limit_s = 600.0 if not rates else 3 * SAMPLES_PER_STEP / max(rates.values())
            try:
                step_s = self.sides[name].run(num_steps=3, num_threads=num_threads, seed=0, limit_s=limit_s)
            except TooSlowError:
                self.sides[name] = self._start(name)
                self.sides[name].wait_ready()
                step_s = []
            rates[num_threads] = rate(step_s) if step_s else 0.0
            tell(f"{name}, {num_threads} threads: {rates[num_threads]:.1f} samples/s")
        return max(rates, key=lambda each: rates[each]), {str(key): value for key, value in rates.items()}


def tell(line: str) -> None:
    """Print progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


def rate(step_s: Sequence[float]) -> float:
    """Return samples per second over steps."""
    return SAMPLES_PER_STEP * len(step_s) / sum(step_s)


def measure(bench: Bench, *, is_quick: bool, repeats: int, start_s: float) -> dict[str, Any]:
    """Run the sides in turns; return the figures."""
    threads, thread_rates = dict.fromkeys(bench.sides, 1), {}
    if not is_quick:
        for name in bench.sides:
            threads[name], thread_rates[name] = bench.best_threads(name)
    longest_s = 0.0
    rows: list[dict[str, float]] = []
    waterfalls = []
    while len(rows) < repeats and time.monotonic() - start_s + longest_s < TIME_LIMIT_S:
        row_start_s = time.monotonic()
        ours = bench.run_flexmarl(SETTING)
        waterfalls.append(ours["waterfall"])
        others = {name: bench.run_side(name, num_threads=threads[name]) for name in bench.sides}
        rows.append({"flexmarl": ours["samples_per_s"], **others})
        tell(", ".join(f"{name}: {value:.1f}" for name, value in rows[-1].items()) + " samples/s")
        longest_s = max(longest_s, time.monotonic() - row_start_s)
    figures = {name: spread_of([row[name] for row in rows]) for name in rows[0]}
    ratios = {f"ratio_to_{name}": spread_of([row["flexmarl"] / row[name] for row in rows]) for name in bench.sides}
    return {
        "samples_per_s": figures["flexmarl"]["median"],
        "trained_tokens_per_s": NUM_NEW_TOKENS * figures["flexmarl"]["median"],
        **{name: {"samples_per_s": figures[name]["median"]} for name in bench.sides},
        **{name: spread["median"] for name, spread in ratios.items()},
        "presets": {},
        "spreads": {**{f"{name}.samples_per_s": spread for name, spread in figures.items()}, **ratios},
        "waterfall": median_waterfall(waterfalls),
        "threads": threads,
        "thread_rates": thread_rates,
        "repeats": len(rows),
    }


def median_waterfall(waterfalls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the waterfall of the repeat with the median step."""
    return dict(sorted(waterfalls, key=lambda each: float(each["step_s"]))[len(waterfalls) // 2])


def peer_versions(peer_python: str) -> dict[str, str]:
    """Return the versions in the peer's environment."""
    code = "from importlib.metadata import version as v; print(v('comlrl'), v('torch'), v('transformers'))"
    output = subprocess.run([peer_python, "-c", code], capture_output=True, text=True, check=False).stdout.split()
    return dict(zip(("comlrl", "torch", "transformers"), output, strict=False))


def tune(bench: Bench) -> None:
    """Print the samples per second of every setting of GRID, in three rounds."""
    rates: list[list[float]] = [[] for _ in GRID]
    for _ in range(3):
        for place, setting in enumerate(GRID):
            rates[place].append(bench.run_flexmarl(setting)["samples_per_s"])
            print(f"{rates[place][-1]:8.1f}  {' '.join(setting) or '(defaults)'}", flush=True)
    for setting, of_setting in sorted(zip(GRID, rates, strict=True), key=lambda pair: -statistics.median(pair[1])):
        spread = spread_of(of_setting)
        print(
            f"{spread['median']:8.1f}  [{spread['min']:.1f}, {spread['max']:.1f}]  {' '.join(setting) or '(defaults)'}"
        )


def print_text(result: Mapping[str, Any]) -> None:
    """Print the result for people."""
    for name, spread in result["spreads"].items():
        print(f"{name:24} {spread['median']:8.2f}  [{spread['min']:.2f}, {spread['max']:.2f}]")
    waterfall = result["waterfall"]
    print(f"\na step takes {waterfall['step_s']:.3f} s:")
    for name, seconds in waterfall["phases_s"].items():
        print(f"  {name:15} {seconds:7.3f} s  {PHASES[name]}")
    print("share of the cores' time:")
    for name, share in [*waterfall["busy_frac"].items(), ("idle, orchestrator", waterfall["idle_frac"])]:
        print(f"  {name:20} {share:6.1%}")


def main() -> None:
    """Run the benchmark."""
    parser = parser_of("A whole training run beside a plain loop and a peer system.", quick="one repeat of few steps")
    parser.add_argument("--repeats", type=int, default=5, help="of every side, in turns")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter of an environment that holds comlrl")
    parser.add_argument("--tune", action="store_true", help="only compare the settings of GRID")
    arguments = parser.parse_args()
    start_s = time.monotonic()
    num_steps = 3 if arguments.quick else NUM_STEPS
    config = {"num_steps": num_steps, "setting": list(SETTING), "is_quick": arguments.quick}
    with tempfile.TemporaryDirectory(prefix="flexmarl-end-to-end-") as scratch, ExitStack() as stack:
        bench = Bench(Path(scratch), stack, peer_python=arguments.peer_python, num_steps=num_steps)
        if arguments.tune:
            tune(bench)
            return
        figures = measure(
            bench, is_quick=arguments.quick, repeats=1 if arguments.quick else arguments.repeats, start_s=start_s
        )
    figures = {"benchmark": "end_to_end", "unit": "samples/s", **figures}
    result = with_setting(figures, config, is_quick=arguments.quick)
    if arguments.peer_python:
        result["environment"]["peer"] = peer_versions(arguments.peer_python)
    if arguments.json:
        print(json.dumps(result))
    else:
        print_text(result)


if __name__ == "__main__":
    main()
