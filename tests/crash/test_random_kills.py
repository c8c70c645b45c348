"""Processes of one long scripted run are killed at random, spread over the whole run: nothing is lost or trained twice.

Victims and delays come from a fixed seed. The i-th kill waits until the run has committed its share of the steps, and a
random time more, so the kills do not crowd at one end, however fast the machine is.
"""

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.rng import derive_seed
from flexmarl.orchestrator.queries import QueryOrder
from flexmarl.testing.runs import LiveRun, RunLab, scripted_config, trained

pytestmark = pytest.mark.crash

NUM_KILLS = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 30
NUM_STEPS = NUM_KILLS // 2
VICTIMS = {"trainer-wr": 3, "trainer-ju": 3, "instance-wr": 3, "instance-ju": 3, "episodes": 3, "fork_server": 1}
"""Beginnings of names of workers and their weights in the draw; every tenth kill is that of the orchestrator."""
MAX_DELAY_S = 0.5
NO_LIMIT = 10**6


def long_config(folder: Path) -> dict[str, Any]:
    """A run whose last step waits for a gate; as many deaths as we like are no reason to give up."""
    config = scripted_config()
    config["pipeline"]["num_steps"] = NUM_STEPS
    config["checkpoint"] = {"every": 5}
    config["training"]["max_attempts"] = config["rollout"]["max_restarts"] = NO_LIMIT
    config["rollout"]["max_retries"] = NO_LIMIT
    config["workflow"] |= {"num_workers": 2, "max_attempts": NO_LIMIT, "max_restarts": NO_LIMIT}
    num_queries = 3 * NUM_STEPS
    order = QueryOrder([{}] * num_queries, per_step=3, seed=derive_seed(0, "data", 0))
    options = {"gate": str(folder / "gate"), "gated_query": order.of_step(NUM_STEPS - 1)[0]}
    config["data"] |= {"num_train": num_queries, "options": options}
    return config


def num_committed(run_dir: Path) -> int:
    try:
        with closing(sqlite3.connect(f"file:{run_dir}/store/index.db?mode=ro", uri=True)) as connection:
            return int(connection.execute("SELECT count(*) FROM commits").fetchone()[0])
    except sqlite3.OperationalError:  # the run is just making it
        return 0


class Killer:
    """Keeps a run going, and kills its processes."""

    def __init__(self, lab: RunLab, config: Path) -> None:
        self.run_dir = lab.folder / "run"
        self.num_lives = 1
        self._lab = lab
        self._live = lab.start("train", config, "run.dir=run")
        self._rng = random.Random(4)
        self._num_kills = 0

    def kill(self, num_steps: int) -> None:
        """Kill a process once `num_steps` steps are committed, some time later."""
        self._wait_for(lambda: num_committed(self.run_dir) >= num_steps)
        victim = self._rng.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        time.sleep(self._rng.uniform(0, MAX_DELAY_S))
        self._num_kills += 1
        if self._num_kills % 10 == 0:
            self._live.process.kill()
            assert self._live.wait() == -signal.SIGKILL, self._live.output()
            self._live.check_nothing_is_left()
            self._live = self._lab.start("train", "run", "--resume")
            self.num_lives += 1
            self._live.mark()
        else:
            self._wait_for(lambda: self._has_killed(victim))

    def _has_killed(self, victim: str) -> bool:
        pids = [pid for name, pid in self._live.workers().items() if name.startswith(f"fm:{victim}")]
        try:
            os.kill(pids[0], signal.SIGKILL)
        except (IndexError, ProcessLookupError):  # dead already, and not yet started again
            return False
        return True

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not is_true():
            assert self._live.process.poll() is None, f"ended too early\n{self._live.output()}"
            assert time.monotonic() < deadline_s, self._live.output()
            time.sleep(0.01)

    def end(self) -> LiveRun:
        """Let the last step go on; return the run when it has ended."""
        (self._lab.folder / "gate").touch()
        assert self._live.wait() == 0, self._live.output()
        self._live.check_nothing_is_left()
        return self._live

    def close(self) -> None:
        """Kill what is left."""
        self._live.process.kill()
        self._live.process.wait()


def test_g2_g4_g5_nothing_is_lost_or_doubled_by_random_kills(tmp_path: Path) -> None:
    lab = RunLab(tmp_path)
    config = lab.write_config(long_config(tmp_path))
    killer = Killer(lab, config)
    try:
        for number in range(NUM_KILLS):
            killer.kill((NUM_STEPS - 1) * number // NUM_KILLS)
        killer.end()
    finally:
        killer.close()
    assert killer.num_lives == 1 + NUM_KILLS // 10
    lab.run("train", config, "run.dir=undisturbed")
    assert len(trained(tmp_path / "undisturbed").steps) == NUM_STEPS
    assert trained(tmp_path / "run") == trained(tmp_path / "undisturbed")
