"""The simulated data plane obeys plans, and notices what a real one could not."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvariantViolation
from quire.memory import NO_OPS, BlockCopy, MemoryOps, RecurrentState, TableDelta
from quire.scheduling import NewSequence, ScheduledSequence, StepPlan
from quire.sequences import SamplingParams
from tests.scheduling.simulated_executor import CountingExecutor, SimulatedExecutor

BLOCK_SIZE = 2


def new_sequence(*token_ids: int, **changes: Any) -> NewSequence:
    fields = {"params": SamplingParams(), "seed": 0, "sample_idx": 0, "num_prompt": len(token_ids)}
    return NewSequence(**{**fields, "token_ids": token_ids, "suppressed_ids": (), **changes})


def item(
    seq_id: int, start: int, token_ids: tuple[int, ...], table: tuple[int, ...] = (), **changes: Any
) -> ScheduledSequence:
    deltas = (TableDelta(0, 0, table),) if table else ()
    return ScheduledSequence(
        **{
            "seq_id": seq_id,
            "start": start,
            "token_ids": token_ids,
            "table_deltas": deltas,
            "num_samples": 1,
            "new_sequence": None,
            **changes,
        }
    )


def test_movements_are_made_without_a_step_too() -> None:
    executor = SimulatedExecutor(BLOCK_SIZE, 13)
    executor.execute(plan(item(1, 0, (5, 6), (1,), new_sequence=new_sequence(5, 6))))
    executor.move(MemoryOps((BlockCopy(0, 1, 2),)))
    moved = (TableDelta(0, 0, (2, 3)),)
    (result,) = executor.execute(plan(item(1, 2, (7,), table_deltas=moved))).items
    assert len(result.token_ids) == 1
    CountingExecutor().move(MemoryOps((BlockCopy(0, 1, 2),)))


def plan(*items: ScheduledSequence, copies: tuple[BlockCopy, ...] = (), finished_ids: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(0, items, MemoryOps(copies), finished_ids)


def fresh(vocab_size: int = 50) -> SimulatedExecutor:
    return SimulatedExecutor(BLOCK_SIZE, vocab_size)


def test_the_next_token_depends_on_seed_sample_and_the_whole_context() -> None:
    def draw(*token_ids: int, **changes: Any) -> tuple[int, ...]:
        step = plan(item(1, 0, token_ids, (1, 2), num_samples=3, new_sequence=new_sequence(*token_ids, **changes)))
        return fresh(10**6).execute(step).items[0].token_ids

    base = draw(1, 2, 3)
    assert base == draw(1, 2, 3)
    assert len(set(base)) == 3
    assert draw(1, 2, 3, sample_idx=1)[:2] == base[1:], "draw i of sample s is sample s + i"
    assert not set(base) & {*draw(2, 2, 3), *draw(1, 2, 4), *draw(1, 2, 3, seed=1)}


def test_chunks_blocks_and_copies_do_not_change_the_draw() -> None:
    tokens = (1, 2, 3, 4)
    whole = fresh().execute(plan(item(1, 0, tokens, (1, 2), new_sequence=new_sequence(*tokens)))).items[0]
    executor = fresh()
    executor.execute(plan(item(1, 0, tokens[:1], (4, 3), num_samples=0, new_sequence=new_sequence(*tokens))))
    executor.execute(plan(item(1, 1, tokens[1:3], num_samples=0)))
    moved = executor.execute(plan(item(1, 3, tokens[3:], (4, 5)), copies=(BlockCopy(0, 3, 6), BlockCopy(0, 6, 5))))
    assert moved.items[0] == whole
    assert executor.num_computed_tokens == 4


def test_suppressed_tokens_are_not_drawn_before_min_tokens_exist() -> None:
    params = SamplingParams(min_tokens=2)
    executor = fresh(vocab_size=3)
    tokens = [0]
    first = new_sequence(0, params=params, suppressed_ids=(0, 1))
    for start in range(2):
        step = plan(item(1, start, tuple(tokens[start:]), (1, 2), new_sequence=first if start == 0 else None))
        tokens += executor.execute(step).items[0].token_ids
    assert tokens[1:] == [2, 2]
    draws = set()
    for seed in range(30):
        again = new_sequence(0, 2, 2, params=params, suppressed_ids=(0, 1), seed=seed, num_prompt=1)
        draws.add(fresh(3).execute(plan(item(1, 0, (0, 2, 2), (1, 2), new_sequence=again))).items[0].token_ids)
    assert draws == {(0,), (1,), (2,)}


def test_closed_sequences_are_forgotten_before_others_are_opened() -> None:
    executor = fresh()
    executor.execute(plan(item(1, 0, (1,), (1,), new_sequence=new_sequence(1))))
    executor.execute(plan(item(1, 0, (2,), (1,), new_sequence=new_sequence(2)), finished_ids=(1,)))
    assert executor.num_open == 1
    executor.close()
    assert executor.num_open == 0


@pytest.mark.parametrize(
    ("number", "second"),
    [
        ("S1", plan(item(1, 0, (5,), (1,), new_sequence=new_sequence(5)))),
        ("S1", plan(item(2, 0, (5,), (3,)))),
        (
            "M3",
            plan(
                item(2, 0, (5,), (3,), new_sequence=new_sequence(5)),
                item(3, 0, (6,), (3,), new_sequence=new_sequence(6)),
            ),
        ),
        ("M3", plan(item(2, 0, (5,), (0,), new_sequence=new_sequence(5)))),
        ("M5", plan(item(2, 2, (5,), (3, 4), new_sequence=new_sequence(7, 8, 5)))),
        ("M5", plan(item(2, 2, (5,), (1, 4), new_sequence=new_sequence(7, 9, 5)))),
        ("M5", plan(item(1, 2, (5,), (2, 1)))),
        ("M5", plan(item(1, 2, (5,), (1, 2)), copies=(BlockCopy(0, 4, 1),))),
    ],
    ids=[
        "opened twice",
        "never opened",
        "two writers of a slot",
        "the null block",
        "nothing stored",
        "another prefix",
        "another position",
        "copied from an empty block",
    ],
)
def test_a_broken_plan_is_noticed(number: str, second: StepPlan) -> None:
    executor = fresh()
    executor.execute(plan(item(1, 0, (7, 8), (1,), new_sequence=new_sequence(7, 8))))
    with pytest.raises(InvariantViolation) as caught:
        executor.execute(second)
    assert caught.value.number == number


def test_the_counting_executor_draws_its_token() -> None:
    executor = CountingExecutor(token_id=7)
    result = executor.execute(StepPlan(3, (item(1, 0, (1,)), item(2, 0, (1,), num_samples=2)), NO_OPS, ()))
    assert (result.tick, [out.token_ids for out in result.items]) == (3, [(7,), (7, 7)])
    executor.close()


@pytest.mark.parametrize(
    ("number", "second"),
    [
        ("M5", plan(item(2, 2, (5,), (0, 2), new_sequence=new_sequence(7, 8, 5)))),
        ("M5", plan(item(1, 1, (5,), (1,)))),
        ("M5", plan(item(2, 2, (5,), (0, 1), new_sequence=new_sequence(7, 9, 5)))),
        ("M3", plan(item(1, 2, (5,), (0, 0)))),
        ("M3", plan(item(1, 2, (5,), (0, 1)), item(2, 2, (6,), (0, 1), new_sequence=new_sequence(7, 8, 6)))),
    ],
    ids=["nothing stored", "a state of more tokens", "of other tokens", "the null block", "two writers"],
)
def test_a_stale_state_is_noticed(number: str, second: StepPlan) -> None:
    executor = SimulatedExecutor(BLOCK_SIZE, 50, [RecurrentState(block_size=BLOCK_SIZE)])
    executor.execute(plan(item(1, 0, (7, 8), (1,), new_sequence=new_sequence(7, 8))))
    with pytest.raises(InvariantViolation) as caught:
        executor.execute(second)
    assert caught.value.number == number


def test_a_state_is_copied_whole_and_carried_on() -> None:
    executor = SimulatedExecutor(BLOCK_SIZE, 50, [RecurrentState(block_size=BLOCK_SIZE)])
    executor.execute(plan(item(1, 0, (7, 8), (1,), new_sequence=new_sequence(7, 8))))
    executor.execute(plan(item(1, 2, (5,), (0, 2)), copies=(BlockCopy(0, 1, 2),)))
    executor.execute(plan(item(2, 2, (6,), (0, 1), new_sequence=new_sequence(7, 8, 6)), finished_ids=(1,)))
