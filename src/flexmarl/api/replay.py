"""`flexmarl.replay`: runs the training side of committed steps again from stored rows, and compares the weights.

It generates nothing and needs no instance. The run folder stays as it is: rows are read without the store's lock, and
states lie on an object plane of this process's own.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from flexmarl.api.build import run_on
from flexmarl.api.resume import BASELINE_NAME, CONFIG_NAME, Baseline
from flexmarl.api.workers import trainer_specs
from flexmarl.config import RootConfig, load_config
from flexmarl.core.codec import from_plain
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.ids import PolicyName
from flexmarl.core.protocols import ExperienceStore, Runtime
from flexmarl.core.records import CommitRecord
from flexmarl.orchestrator.checkpoint import list_checkpoints, load_policy_state, read_manifest
from flexmarl.orchestrator.inbox import OrderedInbox
from flexmarl.scheduling import PipelineRule
from flexmarl.store import StoreView
from flexmarl.telemetry import RunFolder
from flexmarl.training.engine import TrainingEngine
from flexmarl.training.state import PolicyState, PolicyUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPolicy:
    """One policy of a replayed step."""

    policy: PolicyName
    num_micro_batches: int
    """0 when the step left its weights alone."""
    num_samples: int
    recorded_digest: str
    replayed_digest: str

    @property
    def is_equal(self) -> bool:
        """Both have the same weights, bit for bit."""
        return self.recorded_digest == self.replayed_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A committed step that was trained again."""

    step: int
    policy_version: int
    policies: tuple[ReplayedPolicy, ...]
    """In the order of their names."""
    duration_s: float

    @property
    def is_equal(self) -> bool:
        """Every policy has the weights that were committed."""
        return all(policy.is_equal for policy in self.policies)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What a replay came to."""

    run_dir: Path
    first_version: int
    """Version that it began with."""
    start: Path | None
    """Checkpoint that it began with; None for the models of the configuration."""
    steps: tuple[ReplayedStep, ...]
    """In order; the last one may differ, and nothing is replayed after it."""
    error: str | None = None
    """What a step that differs means."""

    @property
    def is_equal(self) -> bool:
        """Every step has given the weights that were committed."""
        return self.error is None


def replay(
    run_dir: str | Path,
    *,
    first_step: int | None = None,
    last_version: int | None = None,
    on_step: Callable[[ReplayedStep], None] | None = None,
) -> ReplayResult:
    """Train the committed steps of a run again, from stored rows with recorded cuts, and compare digests of weights.

    Args:
        run_dir: Folder of a run, which may be live.
        first_step: Begin with the newest checkpoint at or before this step; None takes the oldest state whose later
            rows are all there.
        last_version: Stop at this version; None takes the newest committed one.
        on_step: Called after each step.

    Raises:
        ConfigError: there is no such run, step, version, or model.
        StoreError: the store or a checkpoint is damaged, or rows that are needed have been deleted.
    """
    folder = Path(run_dir).absolute()
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(f"{folder} is not a run folder (it has no {CONFIG_NAME}): give the folder of a run")
    config = load_config(folder / CONFIG_NAME, [f"run.dir={json.dumps(str(folder))}"])
    if config.store.kind != "sqlite":
        raise ConfigError(
            f"{folder}: store.kind={config.store.kind} keeps no rows in the run folder; replay needs sqlite"
        )
    with StoreView.open(folder / "store") as view:
        plan = _plan(folder, view, first_step, last_version)
        with (
            tempfile.TemporaryDirectory(prefix="flexmarl-replay-") as scratch,
            RunFolder.open(Path(scratch) / "run", name=config.run.name) as run_folder,
        ):
            return run_on(config, run_folder, lambda runtime: _replay(config, folder, view, plan, runtime, on_step))


# --- what to replay ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    first_version: int
    checkpoint: Path | None
    commits: Sequence[CommitRecord]
    start_digests: Mapping[PolicyName, str]
    """What the weights of the first version must digest to, as far as it is known."""


def _plan(folder: Path, view: StoreView, first_step: int | None, last_version: int | None) -> _Plan:
    commits = {record.policy_version: record for record in view.commits()}
    if not commits:
        raise ConfigError(f"{folder}: the run has no committed step yet, so there is nothing to replay")
    newest = max(commits)
    last = newest if last_version is None else last_version
    if not 0 < last <= newest:
        raise ConfigError(f"--to {last}: the run has the versions 1 to {newest}")
    if first_step is not None and not 0 <= first_step < last:
        raise ConfigError(f"--from {first_step}: the steps up to version {last} are 0 to {last - 1}")
    checkpoints = dict(list_checkpoints(folder / "checkpoints"))
    starts = [version for version in sorted({0, *checkpoints}) if version < last]
    oldest, why_not_older = _oldest_with_rows(view, [commits[version] for version in range(1, last + 1)])
    first = next((version for version in starts if version >= oldest), None)
    if first is None:
        raise StoreError(
            f"{folder}: nothing is left to replay up to version {last}: no checkpoint below it has all later rows; "
            f"those of step {oldest - 1} cannot be read: {why_not_older}"
        )
    if first_step is not None:
        start = max(version for version in starts if version <= first_step)
        if start < oldest:
            raise StoreError(
                f"step {first_step} needs the rows of steps {start} to {oldest - 1}, which cannot be read: "
                f"{why_not_older}; the first step that can be replayed is {first}"
            )
    else:
        start = first
    return _Plan(
        first_version=start,
        checkpoint=checkpoints.get(start),
        commits=[commits[version] for version in range(start + 1, last + 1)],
        start_digests=_recorded_digests(folder, commits.get(start)),
    )


def _oldest_with_rows(view: StoreView, commits: Sequence[CommitRecord]) -> tuple[int, str]:
    """Return the oldest version after which every row can be read, and why not an older one."""
    for record in reversed(commits):
        try:
            for policy, part in record.policies.items():
                for micro_batch_id in part.micro_batches:
                    view.micro_batch(policy, record.step, micro_batch_id)
        except StoreError as error:
            return record.policy_version, str(error)
    return 0, ""


def _recorded_digests(folder: Path, commit: CommitRecord | None) -> Mapping[PolicyName, str]:
    if commit is not None:
        return {policy: part.weights_digest for policy, part in commit.policies.items()}
    path = folder / BASELINE_NAME
    if not path.exists():
        return {}
    try:
        return from_plain(Baseline, json.loads(path.read_text(encoding="utf-8"))).weights_digests
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged: {error}; remove it to replay without this check") from error


# --- replaying --------------------------------------------------------------------------------------------------------


async def _replay(
    config: RootConfig,
    folder: Path,
    view: StoreView,
    plan: _Plan,
    runtime: Runtime,
    on_step: Callable[[ReplayedStep], None] | None,
) -> ReplayResult:
    inbox = OrderedInbox(_NoEvents())
    engine = TrainingEngine(
        config.training,
        trainer_specs(config),
        algorithms={PolicyName(name): config.algorithm_of(name) for name in config.policies},
        run_seed=config.run.seed,
        max_staleness=PipelineRule(
            mode=config.pipeline.mode, max_staleness=config.pipeline.max_staleness
        ).num_steps_ahead,
        runtime=runtime,
        inbox=inbox,
        events=_NoEvents(),
        store=cast(ExperienceStore, _Rows(view, runtime)),
    )
    steps: list[ReplayedStep] = []
    error = None
    try:
        states = await _start_states(config, plan, runtime)
        await _until(inbox, lambda done: engine.open(states, done))
        updates = engine.updates()
        _check_start(config, plan, updates)
        for record in plan.commits:
            start_s = time.monotonic()
            try:
                await _until(inbox, partial(engine.replay, record))
            except StoreError as failed:
                if _replayed(record, engine.updates(), 0.0).is_equal:
                    raise  # not about the weights
                error = str(failed)
            before, updates = updates, engine.updates()
            steps.append(_replayed(record, updates, time.monotonic() - start_s))
            if on_step is not None:
                on_step(steps[-1])
            if error is not None:
                break
            _forget_old_objects(runtime, before, updates)
    finally:
        engine.close()
        await inbox.close()
    return ReplayResult(
        run_dir=folder, first_version=plan.first_version, start=plan.checkpoint, steps=tuple(steps), error=error
    )


async def _until(inbox: OrderedInbox, begin: Callable[[Callable[[], None]], None]) -> None:
    """Begin work of the engine and handle facts until it calls back."""
    is_done = False

    def done() -> None:
        nonlocal is_done
        is_done = True

    begin(done)
    await inbox.run_until(lambda: is_done)


async def _start_states(config: RootConfig, plan: _Plan, runtime: Runtime) -> dict[PolicyName, PolicyState]:
    if plan.checkpoint is None:
        return {PolicyName(name): PolicyState(weights_version=0, state_key=None) for name in config.policies}
    manifest = read_manifest(plan.checkpoint)
    states = {}
    for policy, entry in manifest.policies.items():
        key = await runtime.call(load_policy_state, plan.checkpoint, policy, manifest, runtime.objects)
        states[policy] = PolicyState(weights_version=entry.weights_version, state_key=key)
    return states


def _check_start(config: RootConfig, plan: _Plan, updates: Mapping[PolicyName, PolicyUpdate]) -> None:
    """Refuse other weights than the run had at the version that the replay begins with."""
    for policy, digest in plan.start_digests.items():
        found = updates[policy].digest
        if found != digest:
            source = plan.checkpoint or f"policies.{policy}.model={config.policies[policy].model}"
            raise ConfigError(
                f"policy {policy}, version {plan.first_version}: {source} has weights {found}, the run had {digest}: "
                "restore the folder, or begin at another checkpoint with --from"
            )


def _replayed(record: CommitRecord, updates: Mapping[PolicyName, PolicyUpdate], duration_s: float) -> ReplayedStep:
    return ReplayedStep(
        step=record.step,
        policy_version=record.policy_version,
        policies=tuple(
            ReplayedPolicy(
                policy=policy,
                num_micro_batches=len(part.micro_batches),
                num_samples=part.denominators.num_samples,
                recorded_digest=part.weights_digest,
                replayed_digest=updates[policy].digest,
            )
            for policy, part in sorted(record.policies.items())
        ),
        duration_s=duration_s,
    )


def _forget_old_objects(
    runtime: Runtime, before: Mapping[PolicyName, PolicyUpdate], updates: Mapping[PolicyName, PolicyUpdate]
) -> None:
    for policy, update in updates.items():
        old = before[policy]
        if old.weights_version != update.weights_version:
            runtime.objects.delete(old.state_key)
            runtime.objects.delete(old.weights_key)


class _Rows:
    """The part of an `ExperienceStore` that replaying reads."""

    def __init__(self, view: StoreView, runtime: Runtime) -> None:
        self._view = view
        self._runtime = runtime

    async def micro_batch(self, policy: PolicyName, step: int, micro_batch_id: str) -> object:
        return await self._runtime.call(self._view.micro_batch, policy, step, micro_batch_id)


class _NoEvents:
    """An `EventSink` that keeps nothing."""

    def emit(self, record: object, *, source: str = "") -> int:
        del record, source
        return 0
