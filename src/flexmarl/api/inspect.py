"""`flexmarl.inspect`: what a run's store holds, while the run lives and after; nothing in its folder is changed."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flexmarl.api.inspect_records import (
    AttemptFacts,
    GroupFacts,
    InspectReport,
    LeaseFacts,
    PolicyVersionFacts,
    RowFacts,
    SealFacts,
    StepDetail,
    StepFacts,
    TrajectoryFacts,
    TurnFacts,
    VersionFacts,
)
from flexmarl.api.resume import CONFIG_NAME
from flexmarl.config import load_config
from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import TrajectoryKey
from flexmarl.core.records import CommitRecord
from flexmarl.store import StoreView
from flexmarl.store.lifecycle import RowStatus
from flexmarl.store.view_records import AttemptView, GroupView, StepView, TurnView
from flexmarl.telemetry.run_folder import LOCK_NAME


def inspect(
    run_dir: str | Path,
    *,
    step: int | None = None,
    policy: str | None = None,
    query: int | None = None,
    trajectory: int | None = None,
) -> InspectReport:
    """Read the store of a run, which may be live.

    Args:
        run_dir: Folder of the run.
        step: Look at this step; None takes the newest one.
        policy: Leave the other policies out.
        query: Show the groups of this query only.
        trajectory: Show the turns of this trajectory; needs `step` and `query`.

    Raises:
        ConfigError: there is no such run, step, policy, query or trajectory.
        StoreError: the store is not there, damaged, or written by other code.
    """
    folder = Path(run_dir).absolute()
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(f"{folder} is not a run folder (it has no {CONFIG_NAME}): give the folder of a run")
    with StoreView.open(folder / "store") as view:
        summary = view.summary()
        _check_policy(policy, sorted(summary.columns))
        steps = view.steps()
        shown = _shown_step(steps, step)
        return InspectReport(
            run_dir=folder,
            name=load_config(folder / CONFIG_NAME).run.name,
            live_pid=_live_pid(folder),
            format_version=summary.format_version,
            store_bytes=sum(summary.file_bytes.values()),
            policy_version=max((each.commit.policy_version for each in steps if each.commit), default=0),
            versions=tuple(_version(each.commit, policy) for each in steps if each.commit),
            steps=tuple(_step(each, policy) for each in steps),
            detail=None if shown is None else _detail(view, shown, policy, query),
            trajectory=None if trajectory is None else _trajectory(view, shown, step, query, trajectory, policy),
        )


# --- what was asked for -----------------------------------------------------------------------------------------------


def _check_policy(policy: str | None, known: Sequence[str]) -> None:
    if policy is not None and policy not in known:
        raise ConfigError(f"--policy {policy}: the store has {', '.join(known) or 'no policy yet'}")


def _shown_step(steps: Sequence[StepView], step: int | None) -> StepView | None:
    if step is None:
        return steps[-1] if steps else None
    for each in steps:
        if each.dispatch.step == step:
            return each
    known = f"the steps are {steps[0].dispatch.step} to {steps[-1].dispatch.step}" if steps else "there is none yet"
    raise ConfigError(f"--step {step}: {known}")


def _live_pid(folder: Path) -> int | None:
    """Return the process that holds the lock of a run folder, without touching the lock."""
    try:
        entry = (folder / LOCK_NAME).stat()
        locks = Path("/proc/locks").read_text(encoding="ascii")
        pid = int(json.loads((folder / LOCK_NAME).read_text(encoding="utf-8"))["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    place = f"{os.major(entry.st_dev):02x}:{os.minor(entry.st_dev):02x}:{entry.st_ino}"
    return pid if any("FLOCK" in line and place in line.split() for line in locks.splitlines()) else None


# --- as flat records --------------------------------------------------------------------------------------------------


def _version(record: CommitRecord, policy: str | None) -> VersionFacts:
    return VersionFacts(
        policy_version=record.policy_version,
        policies=tuple(
            PolicyVersionFacts(
                policy=name,
                weights_version=part.weights_version,
                weights_digest=part.weights_digest,
                num_samples=part.denominators.num_samples,
                num_tokens=part.denominators.num_tokens,
                num_micro_batches=len(part.micro_batches),
            )
            for name, part in sorted(record.policies.items())
            if policy in (None, name)
        ),
    )


def _step(step: StepView, policy: str | None) -> StepFacts:
    rows: Counter[RowStatus] = Counter()
    for name, counts in step.rows.items():
        if policy in (None, name):
            rows.update(counts.by_status)
    return StepFacts(
        step=step.dispatch.step,
        policy_version=None if step.commit is None else step.commit.policy_version,
        num_queries=len(step.dispatch.queries),
        num_trajectories=step.num_trajectories,
        num_ended=step.num_outcomes,
        num_failed=step.num_failures,
        rows=dict(rows),
    )


def _detail(view: StoreView, step: StepView, policy: str | None, query: int | None) -> StepDetail:
    number = step.dispatch.step
    if query is not None and query not in step.dispatch.queries:
        queries = ", ".join(map(str, sorted(step.dispatch.queries)))
        raise ConfigError(f"--query {query} is not in step {number}; its queries: {queries}")
    return StepDetail(
        step=number,
        rows=tuple(_rows(step, policy)),
        groups=tuple(
            _group(group)
            for group in view.groups(number)
            if policy in (None, group.policy) and query in (None, group.query)
        ),
        leases=tuple(
            LeaseFacts(
                lease_id=lease.lease_id,
                policy=lease.policy,
                micro_batch_id=lease.micro_batch_id,
                holder=lease.holder,
                num_rows=lease.num_rows,
                status=lease.status,
            )
            for lease in view.leases(number)
            if policy in (None, lease.policy)
        ),
        seals=tuple(
            SealFacts(
                policy=each.seal.policy,
                number=each.number,
                holder=each.holder,
                num_micro_batches=len(each.seal.micro_batches),
                num_samples=each.seal.denominators.num_samples,
                num_tokens=each.seal.denominators.num_tokens,
            )
            for each in view.seals(number)
            if policy in (None, each.seal.policy)
        ),
    )


def _rows(step: StepView, policy: str | None) -> list[RowFacts]:
    """Split what is counted by status into what has a reason and the rest."""
    found = []
    for name, counts in step.rows.items():
        if policy not in (None, name):
            continue
        without: Counter[RowStatus] = Counter(counts.by_status)
        for (status, reason), number in counts.by_reason.items():
            without[status] -= number
            found.append(RowFacts(policy=name, status=status, reason=reason, num_rows=number))
        found += [
            RowFacts(policy=name, status=status, reason=None, num_rows=number)
            for status, number in without.items()
            if number
        ]
    return sorted(found, key=lambda row: (row.policy, row.status, row.reason or ""))


def _group(group: GroupView) -> GroupFacts:
    rewards = group.rewards
    return GroupFacts(
        query=group.query,
        policy=group.policy,
        num_trajectories=group.num_trajectories,
        num_ended=group.num_outcomes,
        num_failed=group.num_failures,
        num_rows=group.num_rows,
        reward_mean=None if rewards is None else rewards.mean,
        reward_min=None if rewards is None else rewards.lowest,
        reward_max=None if rewards is None else rewards.highest,
    )


def _trajectory(
    view: StoreView, shown: StepView | None, step: int | None, query: int | None, trajectory: int, policy: str | None
) -> TrajectoryFacts:
    if shown is None or step is None or query is None:
        raise ConfigError(f"--trajectory {trajectory} needs --step and --query: it is numbered within a query")
    added = sum(each.num_trajectories for each in shown.extensions if each.query == query)
    last = shown.dispatch.num_trajectories + added - 1
    if not 0 <= trajectory <= last:
        raise ConfigError(
            f"--trajectory {trajectory}: of query {query} in step {step} the trajectories are 0 to {last}"
        )
    key = TrajectoryKey(step, query, trajectory)
    found = view.trajectory(key)
    turns = [turn for attempt in found.attempts for turn in attempt.turns if policy in (None, turn.policy)]
    return TrajectoryFacts(
        key=key,
        attempts=tuple(_attempt(each) for each in found.attempts),
        turns=tuple(_turn(turn) for turn in sorted(turns, key=lambda turn: (turn.key, turn.attempt))),
    )


def _attempt(attempt: AttemptView) -> AttemptFacts:
    outcome, failure = attempt.outcome, attempt.failure
    return AttemptFacts(
        attempt=attempt.attempt,
        ended="outcome" if outcome else "failure" if failure else None,
        success=outcome.success if outcome else None,
        rewards={str(agent): reward for agent, reward in outcome.rewards.items()} if outcome else {},
        message=f"{failure.kind}: {failure.message}" if failure else "",
    )


def _turn(turn: TurnView) -> TurnFacts:
    return TurnFacts(
        key=turn.key,
        attempt=turn.attempt,
        policy=turn.policy,
        status=turn.status,
        reason=turn.reason,
        num_prompt_tokens=turn.num_prompt_tokens,
        num_response_tokens=turn.num_response_tokens,
        finish_reason=turn.finish_reason,
        policy_version=turn.policy_version,
        weights_version=turn.weights_version,
        reward=turn.reward,
        advantage=turn.advantage,
        columns=turn.columns,
    )
