"""The crash matrix: every process of a run is killed, or stopped for a while, at every moment of a step.

    python -m flexmarl.testing.crash_matrix [TEXT ...]

prints it as tables; with TEXTs only the cells with all of them in their name. A cell is one scripted run that is
disturbed once. It passes when the run, or its resume after a death of the orchestrator,

* trains the same samples, gives the same weights digest after each step, the same metrics and the same evaluation as
  the undisturbed run;
* has been disturbed as planned, and leaves no process, no object and no record;
* has not generated again what the store already held (resume with `checkpoint.replay`).

A plan is in terms of events and commands (`kill_points.py`), so no cell depends on the speed of the machine.
"""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexmarl.core.events import WorkerRestarted
from flexmarl.testing.runs import (
    LiveRun,
    RunLab,
    Trained,
    generated_turns,
    recorded_turns,
    records_of,
    scripted_config,
    staleness,
    trained,
)

KILLING = (sys.executable, "-m", "flexmarl.testing.kill_points")

HEARTBEAT_TIMEOUT_S = 1.0
LATE_S = 3.0
"""A stopped process wakes up after so long: when it has been taken for dead."""

VICTIMS = {
    "orchestrator": "orchestrator",
    "instance": "instance-wr",
    "process group": "trainer-wr",
    "episode worker": "episodes",
    "object holder": "writer",
}
"""The process that is killed, by the column's name. Objects lie in files without a holder, so the last is the process
that wrote the newest one."""

MOMENTS = {
    "generation": "event:generated/train/{step}:3",
    "turn written": "event:work_done/store.put_turn {step}:4",
    "outcome reported": "event:trajectory_ended/TRAIN:3",
    "outcome written": "event:work_done/store.record_outcome {step}:3",
    "group closed": "event:group_closed:2",
    "lease": "event:work_done/store.lease wr/{step}:2",
    "backward begun": "send:accumulate_gradient/wr/{step}:2",
    "backward done": "event:gradient_accumulated/wr/{step}:2",
    "acknowledged": "event:work_done/store.acknowledge wr/{step}:2",
    "seal begun": "send:seal_cache/trainer-wr:1",
    "seal made": "event:cache_sealed/wr:1",
    "seal recorded": "event:work_done/store.seal seal/wr:1",
    "update begun": "send:apply_update/trainer-wr:1",
    "update applied": "event:update_applied/wr:1",
    "all updates applied": "event:update_applied:2",
    "publish": "send:load_weights/wr:1",
    "published in part": "event:weights_loaded:1",
    "published": "event:weights_loaded:2",
    "commit recorded": "event:work_done/store.commit:1",
    "committed": "event:step_committed:1",
    "checkpoint begun": "os.mkdir:.step_{saved}.draft:1",
    "checkpoint half": "open:step_{saved}.draft/manifest.json:1",
    "checkpoint renamed": "os.rename:.step_{saved}.draft:1",
    "checkpoint done": "event:checkpoint_written:1",
    "evaluation": "event:generated/eval/:2",
    "evaluation end": "event:trajectory_ended/EVAL:4",
}
"""Where in a plan each moment is, counted from the dispatch of the cell's step."""

FURTHER_MOMENTS = {
    "extended": "event:step_extended:1",
    "scored": "event:scored/wr:1",
    "second update begun": "send:apply_update/trainer-wr:2",
    "second update applied": "event:update_applied/wr:2",
}
"""Those of a few variants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One disturbance of one run."""

    variant: str
    """Configuration, a key of VARIANTS."""
    action: str
    """`kill`; `stop` (it is taken for dead and killed); or `wake` (the kill comes late, and finds it working again)."""
    victim: str
    moment: str
    step: int = 1

    @property
    def name(self) -> str:
        """What the test of the cell is called."""
        return f"{self.variant}: {self.action} {self.victim}: {self.moment}"

    @property
    def plan(self) -> str:
        """In the language of `kill_points.py`."""
        saved = 2 if self.step < 2 else 4
        moment = (MOMENTS | FURTHER_MOMENTS)[self.moment].format(step=f"s{self.step}/", saved=saved)
        role = VICTIMS[self.victim]
        actions = {
            "kill": f"kill {role}",
            "stop": f"stop {role} {LATE_S:g}",
            "wake": f"stop fork_server {LATE_S + 0.15:g} then stop {role} {LATE_S:g}",
        }
        return f"event:step_dispatched/step={self.step},:1 then {moment} then {actions[self.action]}"


def _with(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the matrix with values of sections replaced."""
    config = scripted_config()
    config["workflow"]["num_workers"] = 1
    config["eval"] = {"at_ends": False, "every": 2, "num_queries": 3}
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values}
    return config


VARIANTS: dict[str, dict[str, Any]] = {
    "strict": _with(),
    "serial": _with(pipeline={"mode": "serial"}),
    "one slot": _with(training={"num_slots": 1}),
    "rewind": _with(checkpoint={"replay": False}),
    "one step off": _with(pipeline={"mode": "one_step_off"}),
    "drain": _with(pipeline={"mode": "bounded_async", "max_staleness": 2}),
    "continue": _with(pipeline={"mode": "bounded_async", "max_staleness": 2}, rollout={"on_publish": "continue"}),
    "two epochs": _with(pipeline={"mode": "one_step_off"}, algorithm={"num_epochs": 2, "num_minibatches": 2}),
    "extensions": _with(run={"seed": 7}, pipeline={"max_extensions": 2, "trajectories_per_query": 2}),
}
"""Configurations; the first one has all moments and victims, the others those of VARIANT_MOMENTS. Extensions: with this
seed in the steps 0 and 3."""

VARIANT_MOMENTS = {
    "one slot": ("backward begun", "backward done", "seal made", "update begun", "update applied"),  # it holds the slot
    "rewind": ("turn written", "seal recorded", "published", "commit recorded"),
    "serial": ("turn written", "backward done", "update applied"),
    "one step off": ("turn written", "outcome written", "seal recorded", "update applied", "published in part"),
    "drain": ("turn written", "backward done", "publish", "published in part", "commit recorded"),
    "continue": ("turn written", "backward done", "publish", "published in part", "commit recorded"),
    "two epochs": ("scored", "backward done", "update applied", "second update begun", "second update applied"),
    "extensions": ("extended", "turn written", "update applied"),
}


def cells() -> list[Cell]:
    """Return every cell in the order of the table."""
    found = [
        Cell(variant="strict", action="kill", victim=victim, moment=moment, step=3 if victim == "orchestrator" else 1)
        for moment in MOMENTS
        for victim in VICTIMS
    ]
    found += [
        Cell(variant="strict", action=action, victim=victim, moment=moment)
        for action in ("stop", "wake")
        for victim in VICTIMS
        if (action, victim) != ("wake", "orchestrator")  # which nobody takes for dead
        for moment in ("generation", "lease", "backward begun", "seal made", "update begun", "publish", "evaluation")
    ]
    found += [
        Cell(variant=variant, action="kill", victim=victim, moment=moment, step=3 if variant == "extensions" else 1)
        for variant, moments in VARIANT_MOMENTS.items()
        for moment in moments
        for victim in ("orchestrator", "instance", "process group")
    ]
    return [_at_an_evaluation(cell) for cell in found]


def daily_cells() -> list[Cell]:
    """Return the part that runs on every change: each moment, each further action and each further variant once."""
    victims = list(VICTIMS)
    moments = list(MOMENTS)
    plain = [cell for cell in cells() if (cell.variant, cell.action) == ("strict", "kill")]
    others = [cell for cell in cells() if (cell.variant, cell.action) != ("strict", "kill")]
    found = [cell for cell in plain if victims.index(cell.victim) == moments.index(cell.moment) % len(victims)]
    for number, sort in enumerate(dict.fromkeys((cell.variant, cell.action) for cell in others)):
        victim = ("process group", "orchestrator")[number // 2 % 2]
        of_sort = [cell for cell in others if (cell.variant, cell.action) == sort and cell.victim == victim]
        found.append(of_sort[number % len(of_sort)])
    return found


def _at_an_evaluation(cell: Cell) -> Cell:
    """Return the cell at the step before version 2, at which the matrix evaluates."""
    return replace(cell, step=1) if cell.moment.startswith("evaluation") else cell


def run_cell(cell: Cell, config: Mapping[str, Any], folder: Path, expected: Trained) -> None:
    """Run a cell with a configuration, that of its variant or one like it, in an empty folder.

    Raises:
        AssertionError: it did not pass; says why.
    """
    lab = RunLab(folder)
    run_dir = folder / "run"
    if cell.action != "kill":
        config = {**config, "runtime": {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S}}
    is_death = cell.victim == "orchestrator" and cell.action == "kill"
    with lab.start(cell.plan, "train", lab.write_config(config), "run.dir=run", command=KILLING) as live:
        live.mark()
        code = live.wait()
        _check(code == (-signal.SIGKILL if is_death else 0), f"exit code {code}", live)
        live.check_nothing_is_left()
        _check("kill point: there is no process" not in live.output(), "the victim was not there", live)
        done, planned = (
            live.output().count("kill point: "),
            cell.plan.count("then kill") + cell.plan.count("then stop"),
        )
        _check(done == planned, f"{done} of {planned} actions", live)
    if cell.action != "kill" and cell.victim != "orchestrator":
        reasons = {record.reason for record in records_of(run_dir, WorkerRestarted)}
        assert f"no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s" in reasons, f"nobody was taken for dead: {reasons}"
    if is_death:
        held = recorded_turns(run_dir)
        lab.run("train", "run", "--resume")
        if config.get("checkpoint", {}).get("replay", True):
            again = sorted(held & generated_turns(run_dir))
            assert not again, f"generated again: {', '.join(again[:5])} ({len(again)} of {len(held)})"
    _check_trained(run_dir, config["pipeline"], expected)


def _check_trained(run_dir: Path, pipeline: Mapping[str, Any], expected: Trained) -> None:
    bound = pipeline.get("max_staleness", int(pipeline.get("mode") == "one_step_off"))
    assert staleness(run_dir) <= set(range(bound + 1)), f"staleness {staleness(run_dir)}, allowed are 0 to {bound}"
    found = trained(run_dir)
    if bound > 0:  # then a resume may generate with newer weights
        found, expected = _without_staleness(found), _without_staleness(expected)
    for what in ("steps", "evaluations", "metrics"):
        assert getattr(found, what) == getattr(expected, what), f"other {what} than in the undisturbed run"


def _without_staleness(one: Trained) -> Trained:
    return replace(one, metrics=[{name: row[name] for name in row if "/staleness_" not in name} for row in one.metrics])


def _check(is_good: bool, problem: str, live: LiveRun) -> None:
    assert is_good, f"{problem}\n{live.output()}"


# --- the command ------------------------------------------------------------------------------------------------------


def undisturbed(config: Mapping[str, Any], folder: Path) -> Trained:
    """Return what a configuration trains when nobody disturbs it; run it in an empty folder."""
    lab = RunLab(folder)
    lab.run("train", lab.write_config(config), "run.dir=run")
    return trained(folder / "run")


def main(texts: Iterable[str]) -> int:
    """Run the cells whose names have all of `texts`, print the tables, return the exit code."""
    chosen = [cell for cell in cells() if all(text in cell.name for text in texts)]
    folder = Path(tempfile.mkdtemp(prefix="crash-matrix-"))
    expected: dict[str, Trained] = {}
    results: dict[Cell, str] = {}
    for number, cell in enumerate(chosen):
        config = VARIANTS[cell.variant]
        if cell.variant not in expected:
            expected[cell.variant] = undisturbed(config, _made(folder / cell.variant))
        began_s = time.monotonic()
        try:
            run_cell(cell, config, _made(folder / f"cell{number}"), expected[cell.variant])
        except AssertionError as error:
            results[cell] = "FAILED"
            sys.stderr.write(f"{folder / f'cell{number}'}: {error}\n")
        else:
            results[cell] = f"{time.monotonic() - began_s:.1f} s"
            shutil.rmtree(folder / f"cell{number}")
        sys.stderr.write(f"{number + 1}/{len(chosen)} {cell.name}: {results[cell]}\n")
    _print_tables(results)
    num_failed = list(results.values()).count("FAILED")
    sys.stdout.write(f"{len(results)} cells, {num_failed} failed\n")
    if not num_failed:
        shutil.rmtree(folder)
    return int(num_failed > 0)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _print_tables(results: Mapping[Cell, str]) -> None:
    """Print a table per variant and action: moments down, victims across."""
    for variant, action in dict.fromkeys((cell.variant, cell.action) for cell in results):
        part = {
            (cell.moment, cell.victim): text
            for cell, text in results.items()
            if (cell.variant, cell.action) == (variant, action)
        }
        victims = [victim for victim in VICTIMS if any(victim == each for _, each in part)]
        rows = [[f"{variant}: {action}", *victims]]
        for moment in dict.fromkeys(moment for moment, _ in part):
            rows.append([moment, *(part.get((moment, victim), "") for victim in victims)])
        sys.stdout.write("\n".join("".join(text.ljust(20) for text in row).rstrip() for row in rows) + "\n\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
