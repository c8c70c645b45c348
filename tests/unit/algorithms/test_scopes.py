"""Every statistic has a scope, and a mode that cannot close one is refused with both options."""

import pytest

from flexmarl.algorithms import StatisticScope, statistics, unclosable
from flexmarl.config import AlgorithmConfig

pytestmark = pytest.mark.unit

MODES = ("serial", "strict", "one_step_off", "bounded_async")


def test_scopes_of_the_statistics() -> None:
    found = {each.option: each.scope for each in statistics(AlgorithmConfig(normaliser="sample_mean"))}
    assert found == {
        "algorithm.group_key=agent": StatisticScope.GROUP,
        "algorithm.advantage_scale=std": StatisticScope.GROUP,
        "algorithm.normaliser=sample_mean": StatisticScope.STEP,
    }
    names = [each.name for each in statistics(AlgorithmConfig(advantage_scale="none"))]
    assert names == ["mean_reward", "denominator"]
    scales = [each.scope for each in statistics(AlgorithmConfig(advantage_scale="batch_std")) if "std" in each.name]
    assert scales == [StatisticScope.POLICY_BATCH]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", ["std", "none"])
def test_statistics_of_groups_close_in_every_mode(mode: str, scale: str) -> None:
    assert unclosable(mode, AlgorithmConfig.model_validate({"advantage_scale": scale})) == []


@pytest.mark.parametrize("mode", MODES)
def test_f2_20_a_statistic_of_the_whole_batch_is_refused_where_gradient_work_starts_before(mode: str) -> None:
    errors = unclosable(mode, AlgorithmConfig(advantage_scale="batch_std"))
    if mode in ("strict", "bounded_async"):
        (error,) = errors
        assert f"algorithm.advantage_scale=batch_std with pipeline.mode={mode}" in error
        assert "batch_std is over all samples" in error
    else:
        assert errors == []
    assert unclosable(mode, AlgorithmConfig(advantage_scale="batch_std", num_epochs=2)) == []
