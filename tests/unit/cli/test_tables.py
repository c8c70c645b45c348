"""The tables of `flexmarl inspect`: what is in them, what is left out, and how wide they are."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flexmarl.api import InspectReport
from flexmarl.api.inspect_records import (
    GroupFacts,
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
from flexmarl.cli.tables import MAX_ROWS, report_lines
from flexmarl.core.ids import AgentName, HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import FinishReason
from flexmarl.store.lifecycle import LeaseStatus, RowStatus

pytestmark = pytest.mark.unit

WRITER = PolicyName("writer")


def version(number: int) -> VersionFacts:
    facts = PolicyVersionFacts(
        policy=WRITER,
        weights_version=number,
        weights_digest=f"{number:064d}",
        num_samples=4,
        num_tokens=40,
        num_micro_batches=2,
    )
    return VersionFacts(policy_version=number, policies=(facts,))


def step(number: int, *, is_open: bool = False) -> StepFacts:
    return StepFacts(
        step=number,
        policy_version=None if is_open else number + 1,
        num_queries=2,
        num_trajectories=4,
        num_ended=3,
        num_failed=1,
        rows={RowStatus.MASKED: 1, RowStatus.READY if is_open else RowStatus.COMMITTED: 3},
    )


def report(num_steps: int) -> InspectReport:
    number = num_steps - 1
    detail = StepDetail(
        step=number,
        rows=(RowFacts(policy=WRITER, status=RowStatus.MASKED, reason="truncated", num_rows=1),),
        groups=(
            GroupFacts(
                query=17,
                policy=WRITER,
                num_trajectories=2,
                num_ended=1,
                num_failed=1,
                num_rows=2,
                reward_mean=None,
                reward_min=None,
                reward_max=None,
            ),
        ),
        leases=(
            LeaseFacts(
                lease_id=3,
                policy=WRITER,
                micro_batch_id="writer/s0/m1",
                holder=HolderId("writer#0"),
                num_rows=2,
                status=LeaseStatus.RELEASED,
            ),
        ),
        seals=(
            SealFacts(
                policy=WRITER,
                number=1,
                holder=HolderId("writer#0"),
                num_micro_batches=1,
                num_samples=2,
                num_tokens=20,
            ),
        ),
    )
    return InspectReport(
        run_dir=Path("/runs/a"),
        name="a",
        live_pid=12,
        format_version=2,
        store_bytes=2_500_000,
        policy_version=num_steps - 1,
        versions=tuple(version(number) for number in range(1, num_steps)),
        steps=tuple(step(each, is_open=each == number) for each in range(num_steps)),
        detail=detail,
        trajectory=None,
    )


def table(lines: list[str], title: str) -> list[list[str]]:
    """The words of each line below a title, its headings first."""
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    rows = [line.split() for line in lines[start + 1 :]]
    return rows[: rows.index([])] if [] in rows else rows


def test_each_table_has_its_rows() -> None:
    lines = report_lines(report(2))
    assert lines[0] == "run a in /runs/a: live (pid 12), version 1; store format 2, 2.5 MB"
    assert table(lines, "versions")[1:] == [["1", "writer", "1", "0" * 12, "4", "40", "2"]]
    assert table(lines, "steps") == [
        ["step", "state", "queries", "trajectories", "ended", "failed", "ready", "committed", "masked"],
        ["0", "committed", "1", "2", "4", "3", "1", "0", "3", "1"],
        ["1", "open", "2", "4", "3", "1", "3", "0", "1"],
    ]
    assert table(lines, "rows of step 1")[1:] == [["writer", "masked", "truncated", "1"]]
    assert table(lines, "groups of step 1")[1:] == [["17", "writer", "2", "1", "1", "2"]]
    assert table(lines, "leases of step 1")[1:] == [["3", "writer", "writer/s0/m1", "writer#0", "2", "released"]]
    assert table(lines, "seals of step 1")[1:] == [["writer", "1", "writer#0", "1", "2", "20"]]


def test_a_long_run_shows_its_newest_steps_and_says_what_is_left_out() -> None:
    lines = report_lines(report(50))
    assert f"steps (the last {MAX_ROWS}; {50 - MAX_ROWS} earlier ones are left out)" in lines
    assert f"versions (the last {MAX_ROWS}; {49 - MAX_ROWS} earlier ones are left out)" in lines
    assert [row[0] for row in table(lines, "steps")[1:]] == [str(number) for number in range(40, 50)]


def test_a_terminal_folds_what_is_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = report(2)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    assert max(map(len, report_lines(wide))) <= 100


def test_a_run_that_has_dispatched_nothing_has_empty_tables() -> None:
    empty = InspectReport(
        run_dir=Path("/runs/a"),
        name="a",
        live_pid=None,
        format_version=2,
        store_bytes=0,
        policy_version=0,
        versions=(),
        steps=(),
        detail=None,
        trajectory=None,
    )
    assert report_lines(empty) == [
        "run a in /runs/a: not live, version 0; store format 2, 0.0 MB",
        "",
        "versions: none",
        "",
        "steps: none",
    ]


def test_a_trajectory_without_a_turn_says_none_and_columns_of_turns_are_token_counts() -> None:
    facts = TurnFacts(
        key=SampleKey(1, 17, 0, AgentName("writer"), 0, 2),
        attempt=0,
        policy=WRITER,
        status=RowStatus.READY,
        reason=None,
        num_prompt_tokens=11,
        num_response_tokens=5,
        finish_reason=FinishReason.STOP,
        policy_version=1,
        weights_version=1,
        reward=0.5,
        advantage=1.5,
        columns={"weight": 3.0},
    )
    trajectory = TrajectoryFacts(key=TrajectoryKey(1, 17, 0), attempts=(), turns=(facts,))
    lines = report_lines(replace(report(2), trajectory=trajectory))
    assert "attempts of s1/q17/t0: none" in lines
    headings, row = table(lines, "turns of s1/q17/t0")
    assert headings[4:9] == ["reason", "prompt_tokens", "response_tokens", "finish", "version"]
    assert row == ["writer/b0/n2", "0", "writer", "ready", "11", "5", "stop", "1", "0.5", "1.5", "weight=3.0"]
