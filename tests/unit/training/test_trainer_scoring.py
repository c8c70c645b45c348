"""Forward-only work of trainers: answered once and in order, before gradient work, whatever dies."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from trainer_lab import Killer, Lab, Result, is_the_same, matches, run

from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.events import AllocationDecided, MicroBatchLeased, WorkerRestarted
from flexmarl.core.ids import AgentName, PolicyName, SampleKey
from flexmarl.core.messages import Activated, GradientAccumulated, Scored, UpdateApplied
from flexmarl.core.records import TokenColumn, TokenValues
from flexmarl.runtime.simulated import SimulatedRuntime, run_virtual

pytestmark = pytest.mark.unit

OLD, REFERENCE = TokenColumn.OLD_LOGPROBS, TokenColumn.REFERENCE_LOGPROBS
WITH_REFERENCE = AlgorithmConfig(kl_coef=0.1)
P0 = PolicyName("p0")


def has_died(lab: Lab) -> bool:
    return any(isinstance(record, WorkerRestarted) for record in lab.sink.records)


def scored_run(*args: Any, **settings: Any) -> Result:
    return run(*args, algorithm=WITH_REFERENCE, columns=[REFERENCE], **settings)


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    return scored_run()


def test_requests_are_answered_in_order_with_a_number_per_response_token(undisturbed: Result) -> None:
    # Two requests per step: trajectories 0 and 1, then 2 to 4; trajectory n has n + 1 response tokens.
    lengths = [[(value.key.trajectory, len(value.values)) for value in answer] for answer in undisturbed.scored]
    assert lengths == 2 * [[(0, 1), (1, 2)], [(2, 3), (3, 4), (4, 5)]]
    assert undisturbed.digests != run(algorithm=WITH_REFERENCE.model_copy(update={"kl_coef": 0.0})).digests


def test_small_requests_share_a_batch_within_the_token_budget() -> None:
    async def main(runtime: SimulatedRuntime) -> list[Any]:
        lab = Lab(runtime, ["p0"], lambda record, lab: None, micro_batch_tokens=13)

        async def scores() -> None:
            rows = (await lab.write_rows(0))[P0]

            def each(done: Callable[[], None]) -> None:
                for sample in rows[:-1]:
                    lab.engine.score(P0, OLD, [lab.turns[sample.key]], lambda _: None)
                lab.engine.score(P0, OLD, [lab.turns[rows[-1].key]], lambda _: done())

            await lab.until(each)

        return (await lab.run_with(scores)).of(Scored)

    # 3, 4, 5, 6, 7 tokens. The first was alone when it was sent; 4 + 5 fit into 13, with 6 they would not; 6 + 7 do.
    answers = [[value.key.trajectory for value in fact.values] for fact in run_virtual(main)]
    assert answers == [[0], [1, 2], [3, 4]]


def test_the_store_has_the_values_before_anybody_hears_of_them(undisturbed: Result) -> None:
    filled = [place for place, record in enumerate(undisturbed.records) if matches(record, "store.fill_tokens")]
    leased = [place for place, record in enumerate(undisturbed.records) if isinstance(record, MicroBatchLeased)]
    assert len(filled) == 10
    assert filled[4] < leased[0]


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("what", "count"),
    [
        (what, count)
        for what in (Scored, "store.fill_tokens", "store.lease", GradientAccumulated)
        for count in (1, 4, 7)
    ],
)
def test_g2_a_death_while_scoring(undisturbed: Result, what: type[Any] | str, count: int, is_late: bool) -> None:
    found = scored_run(Killer(what, count, is_late=is_late))
    is_the_same(found, undisturbed)
    assert found.scored == undisturbed.scored
    assert len(found.of(WorkerRestarted)) == 1


def test_g2_a_death_in_the_middle_of_a_batch_computes_it_again_and_nothing_else() -> None:
    def on_emit(record: object, lab: Lab) -> None:
        if isinstance(record, Scored) and record.values[0].key.trajectory == 1 and not has_died(lab):
            asyncio.get_running_loop().call_soon(lab.kill)

    answers = [fact.values[0].key.trajectory for fact in scored_run(on_emit, num_steps=1).of(Scored)]
    assert answers == [0, 1, 2, 3, 4]


def test_g7_turns_that_kill_their_process_group_end_the_run_and_are_named() -> None:
    def on_emit(record: object, lab: Lab) -> None:
        is_next = isinstance(record, Scored) and record.values[0].key.trajectory == 2
        if is_next or (isinstance(record, Activated) and has_died(lab)):
            asyncio.get_running_loop().call_soon(lab.kill)

    with pytest.raises(BackendError) as caught:
        scored_run(on_emit, max_attempts=3)
    text = str(caught.value)
    assert "process group of policy p0 ended 3 times (training.max_attempts=3)" in text
    assert "reference_logprobs of micro-batch p0/score" in text
    assert "(rows s0/q0/t3/p0/b0/n0)" in text


def test_scores_go_before_gradients_and_may_come_at_any_time() -> None:
    async def main(runtime: SimulatedRuntime) -> list[Any]:
        lab = Lab(runtime, ["p0"], lambda record, lab: None, seal_every=100)

        async def one_step() -> None:
            rows, later = [(await lab.write_rows(step))[P0] for step in (0, 1)]
            lab.engine.begin_step(0, may_train=True)
            lab.engine.add_ready(P0, rows)
            await lab.score(P0, REFERENCE, later)
            await lab.until(lambda done: lab.engine.update(1, done))

        await lab.run_with(one_step)
        return lab.result.of(Scored | GradientAccumulated)  # type: ignore[arg-type]

    kinds = [type(record).__name__ for record in run_virtual(main)]
    # The first micro-batch was under way when the turns came.
    assert kinds == ["GradientAccumulated", *["Scored"] * 5, *["GradientAccumulated"] * 4]


def test_a_policy_that_only_scores_gets_a_slot_and_gives_it_back() -> None:
    async def main(runtime: SimulatedRuntime) -> Result:
        lab = Lab(runtime, ["p0", "p1", "p2"], lambda record, lab: None, algorithm=WITH_REFERENCE, num_slots=1)

        async def scores() -> None:
            ready = await lab.write_rows(0)
            for policy in (*lab.policies, *lab.policies):
                await lab.score(policy, REFERENCE, ready[policy])

        return await lab.run_with(scores)

    result = run_virtual(main)
    assert len(result.scored) == 12
    activated = [record.policy for record in result.of(AllocationDecided) if record.action == "activate"]
    # Each once to publish; p2 is the last and has to make room.
    assert activated == ["p0", "p1", "p2", "p0", "p1", "p2", "p0", "p1", "p2"]


def test_old_logprobs_wait_for_the_last_of_several_updates() -> None:
    def on_emit(record: object, lab: Lab) -> None:
        if isinstance(record, UpdateApplied) and len(lab.result.scored) == 2:
            # After the first of three updates of step 0, a row of step 1 is asked for: the weights are nobody's.
            row = lab.turns[SampleKey(1, 0, 0, AgentName("p0"), 0, 0)]
            lab.engine.score(P0, OLD, [row], lab.result.scored.append)
            lab.engine.score(P0, REFERENCE, [row], lab.result.scored.append)

    async def main(runtime: SimulatedRuntime) -> Lab:
        lab = Lab(runtime, ["p0"], on_emit, algorithm=AlgorithmConfig(num_minibatches=3))

        async def two_steps() -> None:
            rows, later = [(await lab.write_rows(step))[P0] for step in (0, 1)]
            lab.engine.begin_step(0, may_train=True)
            await lab.score(P0, OLD, rows)
            lab.engine.add_ready(P0, rows)
            await lab.until(lambda done: lab.engine.update(1, done))
            await lab.score(P0, OLD, later)

        await lab.run_with(two_steps)
        return lab

    lab = run_virtual(main)
    order = [
        record.column.value if isinstance(record, Scored) else f"update {record.policy_version}"
        for record in lab.result.records
        if isinstance(record, Scored | UpdateApplied)
    ]
    asked = ["update 1", "reference_logprobs", "update 1", "update 1", "old_logprobs"]
    assert order[5 : 5 + len(asked)] == asked
    # Under version 1, as when it is asked again after the step.
    (old,), again = lab.result.scored[3], lab.result.scored[4]
    assert old == again[0]


def test_an_answer_for_other_rows_is_refused() -> None:
    async def main(runtime: SimulatedRuntime) -> None:
        lab = Lab(runtime, ["p0"], lambda record, lab: None)

        async def scores() -> None:
            ready = (await lab.write_rows(0))[P0]
            inbox_post = lab.inbox.post

            def post(source: str, fact: object, handler: Callable[[], None]) -> None:
                if isinstance(fact, Scored):
                    wrong = (TokenValues(key=fact.values[0].key, values=(0.5,) * 9),)
                    object.__setattr__(fact, "values", wrong)
                inbox_post(source, fact, handler)

            lab.inbox.post = post  # type: ignore[method-assign]
            await lab.score(P0, OLD, ready)

        await lab.run_with(scores)

    with pytest.raises(
        InvariantError, match=r"answers p0/score0 with old_logprobs of .* 9\)\], asked for was .*, 1\)\]"
    ):
        run_virtual(main)


def test_nothing_to_score_is_answered_at_once() -> None:
    async def main(runtime: SimulatedRuntime) -> list[tuple[TokenValues, ...]]:
        lab = Lab(runtime, ["p0"], lambda record, lab: None)
        answers: list[tuple[TokenValues, ...]] = []

        async def scores() -> None:
            lab.engine.score(P0, OLD, [], answers.append)

        await lab.run_with(scores)
        return answers

    assert run_virtual(main) == [()]
