"""Where a run begins: at the models of its configuration, at a checkpoint, or where it was interrupted."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flexmarl.api.build import CheckedInputs
from flexmarl.config import RootConfig, load_config
from flexmarl.core.codec import from_plain, to_plain
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.ids import PolicyName
from flexmarl.core.protocols import ExperienceStore, Runtime, StoredStep
from flexmarl.orchestrator.checkpoint import data_digest, list_checkpoints, load_policy_state, read_manifest
from flexmarl.orchestrator.evaluation import EvaluationResult
from flexmarl.orchestrator.parts import RunResult, StartState
from flexmarl.telemetry import RunFolder
from flexmarl.telemetry.jsonl import write_atomically
from flexmarl.training.state import PolicyState

BASELINE_NAME = "baseline.json"
CONFIG_NAME = "config.yaml"
CURSOR_OPTIONS = ("run.seed", "data.seed", "pipeline.queries_per_step")
"""Keys that can never change: with the data they decide which queries a step trains."""
FIXED_OPTIONS = (
    "policies.",
    "agents.",
    "algorithm.",
    "optimizer.",
    "workflow.path",
    "pipeline.mode",
    "pipeline.max_staleness",
    "pipeline.max_extensions",
    "rollout.temperature",
    "rollout.max_new_tokens",
    "rollout.ignore_stop",
    "training.backend.",
    "store.columns.",
)
"""Beginnings of the keys on which stored rows depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the end of a run is compared with; kept in the run folder, so that a resumed run compares with it too."""

    weights_digests: Mapping[PolicyName, str]
    data_digest: str
    """Of the training queries: a resumed run must see the same."""
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
    """Put the newest checkpoint's states on the object plane, and find what the store knows of the time after it.

    With `checkpoint.replay` that is trained again and gone on with; without it the store forgets it. `tell` is called
    with what a user would want to know.

    Raises:
        ConfigError: the checkpoint is of other policies, another seed or other data; or options that stored rows depend
            on have changed.
        StoreError: it is damaged.
    """
    state = await load_checkpoint(config, inputs, folder.checkpoints_path, runtime) or first_state(config)
    state = replace(state, is_resumed=True)
    _refuse_changes(config, folder, CURSOR_OPTIONS, "they decide which queries a step trains: give the old values")
    _refuse_changes(config, folder, ("store.kind", "store.factory"), "the run's rows are there: give the old values")
    baseline = _read_baseline(folder)
    if baseline is not None and baseline.data_digest != data_digest(inputs.train_queries):
        raise ConfigError(
            f"{folder.path}: the run began with other training data (digest {baseline.data_digest}): resume it with "
            "the data that it was started with"
        )
    last = await store.last_commit()
    committed = 0 if last is None else last.policy_version
    is_there = await store.pruned_version() <= state.policy_version <= committed
    if config.checkpoint.replay and is_there:
        state = await _with_stored(state, config, folder, store, tell)
    else:
        _tell_what_is_lost(state.policy_version, committed, folder, tell)
        await store.rewind(state.policy_version)
    if baseline is None and state.policy_version == 0 and (state.commits or state.open_steps):
        raise StoreError(
            f"{folder.path / BASELINE_NAME} is missing, so nobody can tell whether the stored rows are of these "
            "training data: restore it, or give checkpoint.replay=false to begin again"
        )
    if baseline is None or (state.policy_version == 0 and not state.commits and not state.open_steps):
        return state
    return replace(state, digests_before=baseline.weights_digests, before=_evaluation_of(baseline))


def kept_options(config: RootConfig, folder: RunFolder) -> RootConfig:
    """Return what a resumed run writes as its configuration: `checkpoint.replay` counts for one resume only."""
    replay = load_config(folder.path / CONFIG_NAME).checkpoint.replay
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"replay": replay})})


async def _with_stored(
    state: StartState, config: RootConfig, folder: RunFolder, store: ExperienceStore, tell: Callable[[str], None]
) -> StartState:
    """Return the state with the commits and open steps after its version."""
    commits = await store.commits_after(state.policy_version)
    open_steps = await store.open_steps()
    if failed := next((each for each in open_steps if _has_only_failures(each)), None):
        # Nothing of it is left to run: it would end the run again, whatever has been mended meanwhile.
        tell(f"step {failed.dispatch.step + 1}: every trajectory had failed, so it runs again")
        await store.rewind(failed.dispatch.step)
        open_steps = [each for each in open_steps if each.dispatch.step < failed.dispatch.step]
    if not commits and not open_steps:
        return state
    _refuse_changes(
        config,
        folder,
        FIXED_OPTIONS,
        "the store holds rows that were made with the old values: give those, or checkpoint.replay=false to go back to "
        "the newest checkpoint and forget the rows",
    )
    if commits:
        first, last = commits[0].policy_version, commits[-1].policy_version
        tell(f"training steps {first} to {last} again from stored rows, without generation")
    for each in open_steps:
        num_ended = sum(one.outcome is not None or one.failure is not None for one in each.trajectories)
        num_all = len(each.dispatch.trajectories()) + sum(one.num_trajectories for one in each.extensions)
        num_turns = sum(len(one.turns) for one in each.trajectories)
        tell(
            f"going on with step {each.dispatch.step + 1}: {num_ended} of {num_all} trajectories had ended, "
            f"{num_turns} turns are kept"
        )
    return replace(state, commits=tuple(commits), open_steps=tuple(open_steps))


def _has_only_failures(step: StoredStep) -> bool:
    num_all = len(step.dispatch.trajectories()) + sum(each.num_trajectories for each in step.extensions)
    return sum(each.failure is not None for each in step.trajectories) == num_all


def _refuse_changes(config: RootConfig, folder: RunFolder, options: tuple[str, ...], advice: str) -> None:
    """Refuse other values of options than those that the run folder's configuration has."""
    path = folder.path / CONFIG_NAME
    before, now = _flat(load_config(path).model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    changed = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key.startswith(options) and not key.endswith(".num_instances")
    ]
    if changed:
        raise ConfigError(f"{path}: a resume cannot change {'; '.join(changed)}: {advice}")


def _flat(plain: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _tell_what_is_lost(version: int, committed: int, folder: RunFolder, tell: Callable[[str], None]) -> None:
    if version == 0 and committed > 0:
        tell(f"no checkpoint in {folder.checkpoints_path}: {committed} committed steps run again from the first")
    elif committed > version:
        tell(f"going back from version {committed} to checkpoint step_{version}: later steps run again")
    elif committed < version:
        tell(
            f"the store in {folder.store_path} knows {committed} of the {version} steps before the "
            "checkpoint: trained ids of the others are gone, the weights are not"
        )


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


def write_baseline(folder: RunFolder, inputs: CheckedInputs, result: RunResult) -> None:
    """Keep what the end of the run will be compared with."""
    baseline = Baseline(weights_digests=result.digests_before, data_digest=data_digest(inputs.train_queries))
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
    if len(baseline.queries) != len(baseline.sampled):
        raise StoreError(
            f"{BASELINE_NAME} is damaged: {len(baseline.sampled)} figures for {len(baseline.queries)} queries; "
            "restore it"
        )
    return EvaluationResult(
        policy_version=0,
        sampled=dict(zip(baseline.queries, baseline.sampled, strict=True)),
        greedy=dict(zip(baseline.queries, baseline.greedy, strict=False)),
        rewards={},
        has_success=baseline.has_success,
        num_failed=baseline.num_failed,
        duration_s=baseline.duration_s,
    )
