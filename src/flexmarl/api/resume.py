"""Where a run begins: at the models of its configuration, or at a checkpoint."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flexmarl.api.build import CheckedInputs
from flexmarl.config import RootConfig
from flexmarl.core.codec import from_plain, to_plain
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.ids import PolicyName
from flexmarl.core.protocols import ExperienceStore, Runtime
from flexmarl.orchestrator.checkpoint import data_digest, list_checkpoints, load_policy_state, read_manifest
from flexmarl.orchestrator.evaluation import EvaluationResult
from flexmarl.orchestrator.parts import RunResult, StartState
from flexmarl.telemetry import RunFolder
from flexmarl.telemetry.jsonl import write_atomically
from flexmarl.training.state import PolicyState

BASELINE_NAME = "baseline.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the end of a run is compared with; kept in the run folder, so that a resumed run compares with it too."""

    weights_digests: Mapping[PolicyName, str]
    queries: tuple[int, ...] = ()
    sampled: tuple[float, ...] = ()
    greedy: tuple[float, ...] = ()
    has_success: bool = False
    num_failed: int = 0
    duration_s: float = 0.0


def first_state(config: RootConfig) -> StartState:
    """Return the start of a new run."""
    return StartState(
        policies={PolicyName(name): PolicyState(weights_version=0, state_key=None) for name in config.policies}
    )


async def resumed_state(
    config: RootConfig,
    inputs: CheckedInputs,
    folder: RunFolder,
    runtime: Runtime,
    store: ExperienceStore,
    *,
    tell: Callable[[str], None],
) -> StartState:
    """Go back to the newest checkpoint: its states on the object plane, the store without what came after.

    `tell` is called with what a user would not expect: that steps run again for want of a checkpoint, or that the store
    does not know the steps before it.

    Raises:
        ConfigError: the checkpoint is of other policies, another seed or other data.
        StoreError: it is damaged.
    """
    state = await load_checkpoint(config, inputs, folder.checkpoints_path, runtime) or first_state(config)
    last = await store.last_commit()
    committed = 0 if last is None else last.policy_version
    if state.policy_version == 0 and committed > 0:
        tell(f"no checkpoint in {folder.checkpoints_path}: {committed} committed steps run again from the first")
    elif committed < state.policy_version:
        tell(
            f"the store in {folder.store_path} knows {committed} of the {state.policy_version} steps before the "
            "checkpoint: trained ids of the others are gone, the weights are not"
        )
    await store.rewind(state.policy_version)
    baseline = _read_baseline(folder) if state.policy_version > 0 else None
    if baseline is None:
        return state
    return replace(state, digests_before=baseline.weights_digests, before=_evaluation_of(baseline))


async def load_checkpoint(
    config: RootConfig, inputs: CheckedInputs, checkpoints: Path, runtime: Runtime
) -> StartState | None:
    """Put the states of the newest checkpoint in a folder on the object plane; None when there is no checkpoint.

    Raises:
        ConfigError: the checkpoint is of other policies, another seed or other data.
        StoreError: it is damaged.
    """
    found = list_checkpoints(checkpoints)
    if not found:
        return None
    version, path = found[-1]
    manifest = read_manifest(path)
    expected = {
        "policies": (sorted(manifest.policies), sorted(config.policies)),
        "run.seed": (manifest.run_seed, config.run.seed),
        "training data (digest)": (manifest.data_digest, data_digest(inputs.train_queries)),
    }
    for what, (saved, given) in expected.items():
        if saved != given:
            raise ConfigError(
                f"{path}: {what} of the checkpoint is {saved}, of this configuration {given}; "
                "use the configuration that the run was started with"
            )
    policies = {}
    for policy, entry in manifest.policies.items():
        key = await runtime.call(load_policy_state, path, policy, manifest, runtime.objects)
        policies[policy] = PolicyState(weights_version=entry.weights_version, state_key=key)
    return StartState(policy_version=version, policies=policies)


def write_baseline(folder: RunFolder, result: RunResult) -> None:
    """Keep what the end of the run will be compared with."""
    baseline = Baseline(weights_digests=result.digests_before)
    if result.before is not None:
        queries = tuple(sorted(result.before.sampled))
        baseline = replace(
            baseline,
            queries=queries,
            sampled=tuple(result.before.sampled[query] for query in queries),
            greedy=tuple(result.before.greedy[query] for query in queries if query in result.before.greedy),
            has_success=result.before.has_success,
            num_failed=result.before.num_failed,
            duration_s=result.before.duration_s,
        )
    write_atomically(folder.path / BASELINE_NAME, json.dumps(to_plain(baseline)) + "\n")


def _read_baseline(folder: RunFolder) -> Baseline | None:
    path = folder.path / BASELINE_NAME
    if not path.exists():
        return None
    try:
        return from_plain(Baseline, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged: {error}; remove it to resume without the comparison") from error


def _evaluation_of(baseline: Baseline) -> EvaluationResult | None:
    if not baseline.queries:
        return None
    return EvaluationResult(
        policy_version=0,
        sampled=dict(zip(baseline.queries, baseline.sampled, strict=True)),
        greedy=dict(zip(baseline.queries, baseline.greedy, strict=False)),
        rewards={},
        has_success=baseline.has_success,
        num_failed=baseline.num_failed,
        duration_s=baseline.duration_s,
    )
