"""Cells of the crash matrix (`testing/crash_matrix.py`): one of each sort here, all of them in the nightly run."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flexmarl.testing.crash_matrix import MOMENTS, VARIANTS, VICTIMS, Cell, cells, daily_cells, run_cell, undisturbed
from flexmarl.testing.runs import RunLab, Trained, trained

pytestmark = pytest.mark.crash

IS_NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
CHOSEN = cells() if IS_NIGHTLY else daily_cells()


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """What a variant trains when nobody disturbs it."""

    @cache
    def reference_of(variant: str) -> Trained:
        found = undisturbed(VARIANTS[variant], tmp_path_factory.mktemp("undisturbed"))
        assert sorted(found.steps) == [row["step"] for row in found.metrics] == [0, 1, 2, 3]
        assert len({str(step.weights_digests) for step in found.steps.values()}) == 4
        assert sorted(found.evaluations) == [2]
        return found

    return reference_of


def test_daily_cells_have_every_moment_victim_action_and_variant() -> None:
    assert set(MOMENTS) <= {cell.moment for cell in daily_cells()}
    for name in ("victim", "action", "variant"):
        assert {getattr(cell, name) for cell in daily_cells()} == {getattr(cell, name) for cell in cells()}
    assert len({cell.name for cell in cells()}) == len(cells())
    assert {cell.victim for cell in cells()} == set(VICTIMS)


@pytest.mark.parametrize("cell", CHOSEN, ids=[cell.name for cell in CHOSEN])
def test_g2_g4_g5_g7_a_disturbed_run_trains_what_the_undisturbed_one_does(
    cell: Cell, tmp_path: Path, reference_of: Callable[[str], Trained]
) -> None:
    run_cell(cell, VARIANTS[cell.variant], tmp_path, reference_of(cell.variant))


def test_a_cell_sees_a_sample_too_few_other_weights_and_a_plan_that_was_not_carried_out(
    tmp_path: Path, reference_of: Callable[[str], Trained]
) -> None:
    """The checks of a cell can fail."""
    reference = reference_of("strict")
    cell = Cell(variant="strict", action="kill", victim="process group", moment="backward done")
    (policy, keys), *_ = reference.steps[2].keys.items()
    step = replace(reference.steps[2], keys={**reference.steps[2].keys, policy: keys[1:]})
    digests = replace(reference.steps[2], weights_digests={**reference.steps[2].weights_digests, policy: "0"})
    (tmp_path / "a").mkdir()
    with pytest.raises(AssertionError, match="other steps"):
        run_cell(cell, VARIANTS["strict"], tmp_path / "a", replace(reference, steps={**reference.steps, 2: step}))
    found = trained(tmp_path / "a" / "run")
    assert found == reference
    assert found != replace(reference, steps={**reference.steps, 2: digests})
    (tmp_path / "b").mkdir()
    with pytest.raises(AssertionError, match="0 of 1 actions"):
        run_cell(replace(cell, step=9), VARIANTS["strict"], tmp_path / "b", reference)
    with pytest.raises(AssertionError, match="exit code 0"):
        RunLab(tmp_path).run("train", "a/run", "--resume", expect=1)
