"""The cost model of drafts, fitted to the steps of a machine with known costs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quire.engine.control.draft_costs import BASELINE_INTERVAL, DraftCosts


def flat(num_rows: int) -> float:
    return 0.010 + 0.0003 * num_rows


def stepped(num_rows: int) -> float:
    return 0.010 if num_rows <= 4 else 0.016 + 0.001 * num_rows


def noted(cost: Callable[[int], float], num_seqs: int, depths: list[int], num_steps: int, noise: float) -> DraftCosts:
    costs, rng = DraftCosts(8), random.Random(0)
    for step in range(num_steps):
        depth = 0 if costs.needs_baseline else depths[step % len(depths)]
        costs.record_step(num_seqs, num_seqs * depth, cost(num_seqs * (1 + depth)) * (1 + noise * rng.random()))
    return costs


@pytest.mark.parametrize("cost", [flat, stepped])
@pytest.mark.parametrize("num_seqs", [1, 3, 16])
def test_costs_are_those_of_the_machine(cost: Callable[[int], float], num_seqs: int) -> None:
    believed = noted(cost, num_seqs, [0, 1, 2, 4, 8], 400, 0.02).by_depth(num_seqs)
    assert believed[0] == 1.0
    for depth in (1, 2, 4, 8):
        assert believed[depth] == pytest.approx(cost(num_seqs * (1 + depth)) / cost(num_seqs), rel=0.03)
    # Between those that were tried a line is drawn.
    assert min(believed[4], believed[8]) <= believed[6] <= max(believed[4], believed[8])


def test_beyond_what_was_tried_rows_cost_as_much_as_before() -> None:
    believed = noted(flat, 4, [0, 2], 100, 0.0).by_depth(4)
    assert believed[8] - 1 == pytest.approx(4 * (believed[2] - 1))


def test_a_step_that_was_held_up_does_not_count_for_much() -> None:
    costs = noted(flat, 1, [0, 4], 100, 0.0)
    before = costs.by_depth(1)[4]
    costs.record_step(1, 4, 5.0)
    assert costs.by_depth(1)[4] < before + 0.25
    costs.record_step(1, 0, 5.0)
    assert costs.by_depth(1)[4] < before + 0.25


def test_steps_without_drafts_are_measured_first_and_now_and_then() -> None:
    costs = DraftCosts(8)
    costs.record_step(2, 4, 0.01)
    assert costs.needs_baseline, "nothing is known of two sequences without drafts"
    costs.record_step(2, 0, 0.01)
    assert not costs.needs_baseline
    for _ in range(BASELINE_INTERVAL):
        assert not costs.needs_baseline
        costs.record_step(2, 4, 0.01)
    assert costs.needs_baseline


def test_steps_that_overlap_are_counted_and_not_measured() -> None:
    costs = noted(flat, 2, [0, 4], 100, 0.0)
    before = costs.by_depth(2)
    costs.record_step(2, 0, flat(2))
    for _ in range(BASELINE_INTERVAL):
        assert not costs.needs_baseline
        costs.record_step(2, 0, None)
    assert costs.needs_baseline
    assert costs.by_depth(2) == before
    costs.record_step(2, 0, flat(2))
    assert not costs.needs_baseline
    costs.record_step(3, 0, None)
    assert costs.needs_baseline, "nothing is known of three sequences by themselves"


def test_what_is_known_of_a_few_sequences_holds_for_about_as_many() -> None:
    costs = noted(flat, 5, [0, 3], 100, 0.0)
    assert costs.by_depth(6) == costs.by_depth(5)
    assert costs.by_depth(9) == DraftCosts(8).by_depth(9)
