"""The work of whole steps as compiled code plans it, against the planner that goes from row to row."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from quire.ops.cpu.native_step_work import StepWorkKernels
from quire.ops.interface.ops import AttentionBatch
from quire.ops.triton.attention.step_numbers import StepCut, StepNumbers, number_work, step_kernels
from tests.ops.triton.test_shared_prefixes import DECODE, GROUP, PREFILL, random_tables, rule_of

NONE = torch.empty(0, dtype=torch.int64)


@pytest.fixture
def kernels() -> StepWorkKernels:
    """Return the compiled code."""
    found = step_kernels()
    if found is None:
        pytest.skip("there is no compiled code")
    return found


def equal_numbers(batch: AttentionBatch, cut: StepCut, kernels: StepWorkKernels) -> StepNumbers:
    """Return the numbers of a step, after a comparison with those of the slow twin."""
    found, expected = number_work(batch, cut, kernels), number_work(batch, cut, None)
    assert found[:-1] == expected[:-1]
    assert torch.equal(found.numbers, expected.numbers)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_compiled_code_plans_what_the_slow_planner_plans(seed: int, kernels: StepWorkKernels) -> None:
    """Decodes, drafts and prompts in one step, in trees of prefixes, under windows and in chunks."""
    rng = random.Random(seed)
    contexts = [rng.choice([3, 600, 650, 2000, 9000]) + rng.randrange(40) for _ in range(rng.randint(0, 40))]
    counts = [min(context, rng.choice([1, 1, 1, 3, 20, 300])) for context in contexts]
    ids, starts = random_tables(rng, contexts)
    window, chunk = rng.choice([(None, None), (None, None), (700, None), (1, None), (None, 2048)])
    row_starts = list(accumulate(counts, initial=0))
    batch = AttentionBatch(NONE, row_starts, contexts, torch.tensor(ids, dtype=torch.int64), starts, window, chunk)
    rule = rng.choice([None, rule_of(), rule_of(), rule_of(least_bytes=1e6)])
    cut = StepCut(GROUP, DECODE, PREFILL, rng.choice([1, 2, 8]), rng.choice([1, 20, 132]), rule)
    equal_numbers(batch, cut, kernels)


def test_rows_of_several_sequences_in_one_range(kernels: StepWorkKernels) -> None:
    """Three sequences of one to three rows, and one with too many, behind 640 tokens; tiles hold four rows."""
    tables = [[*range(40), 100 + seq] for seq in range(4)]
    ids = torch.tensor([block for table in tables for block in table])
    batch = AttentionBatch(NONE, [0, 3, 4, 7, 17], [643, 641, 643, 650], ids, [0, 41, 82, 123, 164])
    rule = rule_of()
    found = equal_numbers(batch, StepCut(GROUP, DECODE, PREFILL, 2, 1, rule), kernels)
    assert (found.num_shared_items, found.num_shared_rows) == (1, 7)
    # Of each of seven rows, a partial result of the shared tokens and one of its own.
    assert (found.num_parts, found.num_split, found.num_places) == (3, 3, 14)
    few, parts, many, split_rows, items, rows, count = found.sections(found.numbers)
    assert [len(each) for each in (few, parts, many)] == [0, 3 * 8, 8]
    assert items.tolist() == [0, 7, 0, 0, 640, 0, 0, 0]
    assert rows.view(-1, 4)[:, 0].tolist() == list(range(7))
    assert split_rows.view(-1, 4)[:, 3].tolist() == [2, 2, 2]
    assert count.tolist() == [1, 0, 0, 0]


def test_a_context_of_many_splits_has_room(kernels: StepWorkKernels) -> None:
    """More items than are expected of one sequence."""
    ids = torch.arange(4096)
    batch = AttentionBatch(NONE, [0, 1], [65_536], ids, [0, 4096])
    found = equal_numbers(batch, StepCut(GROUP, DECODE, PREFILL, 1, 132, None), kernels)
    assert found.num_parts > 200
