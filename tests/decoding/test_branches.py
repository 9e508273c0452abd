"""Alternative drafts: which there are, how many pay, and how often they are right."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sequences.decoding.lookup import NgramIndex, PromptLookup
from quire.sequences.decoding.speculation import MARGIN, AdaptiveDrafter, branch_lengths
from quire.sequences.decoding.suffixes import SuffixDrafter
from quire.sequences.sequence import Sequence
from tests.decoding.sequences import sequence_of


@settings(max_examples=300)
@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=16), shortest=st.integers(1, 3), first=st.integers(0, 2))
def test_other_continuations_are_those_of_the_longest_matches(tokens: list[int], shortest: int, first: int) -> None:
    expected: dict[int, tuple[int, int]] = {}
    for position in range(shortest, len(tokens)):
        length = next(
            n
            for n in range(4, -1, -1)
            if n <= position and tokens[position - n : position] == tokens[len(tokens) - n :]
        )
        token = tokens[position]
        if length >= shortest and token != first and length >= expected.get(token, (0, 0))[1]:
            expected[token] = position, length
    index = NgramIndex(tokens, shortest, 4)
    index.find()
    found = index.find_others([first])
    assert sorted(found) == sorted(expected.values())
    assert [length for _, length in found] == sorted((length for _, length in found), reverse=True)


def test_a_prompt_is_looked_up_for_several_continuations() -> None:
    drafter, sequence = PromptLookup(1, 4), sequence_of(0, [1, 2, 3, 9, 1, 2, 4, 9, 2, 5, 9, 1, 2], [])
    draft = drafter.propose(sequence, 2)
    assert draft == [4, 9]
    assert drafter.propose_branches(sequence, draft, 2, 4) == [[3, 9], [5, 9]]
    assert drafter.propose_branches(sequence, draft, 1, 1) == [[3]]


def test_earlier_outputs_have_other_continuations_than_the_sequence() -> None:
    drafter = SuffixDrafter(2, 1 << 20)
    ended = sequence_of(0, [9], [5, 1, 2, 7, 7])
    drafter.propose(ended, 1)
    drafter.forget(ended)
    sequence = sequence_of(1, [1, 2, 3, 8, 5, 1, 2], [])
    draft = drafter.propose(sequence, 2)
    assert draft == [7, 7]
    assert drafter.propose_branches(sequence, draft, 2, 3) == [[3, 8]]
    other = sequence_of(2, [5, 1, 2, 3, 8, 5, 1, 2], [])
    draft = drafter.propose(other, 2)
    assert draft == [3, 8]
    assert drafter.propose_branches(other, draft, 2, 3) == [[7, 7]]


def best_lengths(share: float, rates: list[float], depth: int, costs: list[float]) -> list[int]:
    """Return the lengths that add most to the tokens per cost, one branch after the other: the slow twin."""

    def ratio(lengths: list[int]) -> float:
        expected = sum(share**k for k in range(depth + 1))
        missed = 1 - share
        for right, length in zip(rates, lengths, strict=False):
            expected += missed * right * sum(share**k for k in range(length))
            missed *= 1 - right
        return expected / costs[depth + sum(1 + length for length in lengths)]

    lengths: list[int] = []
    for _ in rates:
        most = len(costs) - 1 - depth - sum(1 + length for length in lengths) - 1
        found = [[*lengths, length] for length in range(1, min(depth, most) + 1)]
        best = max(found, key=ratio, default=None)
        if best is None or ratio(best) <= MARGIN * ratio(lengths):
            break
        lengths = best
    return lengths


def test_branches_are_as_many_and_as_long_as_pay() -> None:
    seen = set()
    for share, right, row_cost, depth in product((0.1, 0.5, 0.9), (0.05, 0.5, 0.9), (0.0, 0.01, 0.1), (1, 3)):
        costs = [1.0 + row_cost * k for k in range(3 * (depth + 1))]
        rates = [right, right / 2]
        found = branch_lengths(share, rates, depth, costs)
        assert found == best_lengths(share, rates, depth, costs)
        seen.add(len(found))
    assert seen == {0, 1, 2}


class Choices:
    """Has the right token as its first, second or third choice."""

    def propose(self, sequence: Sequence, limit: int) -> Tokens[int]:  # noqa: ARG002
        return (0,) * limit

    def propose_branches(self, sequence: Sequence, draft: Tokens[int], limit: int, count: int) -> Tokens[Tokens[int]]:  # noqa: ARG002
        return [(rank,) * limit for rank in range(1, count + 1)]

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Do nothing."""

    def forget(self, sequence: Sequence) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("second", "row_cost", "used"), [(0.9, 0.005, True), (0.02, 0.005, False), (0.9, 0.6, False)])
def test_branches_stop_where_they_do_not_pay(second: float, row_cost: float, used: bool) -> None:
    drafter, rng = AdaptiveDrafter(Choices(), 3, 2), random.Random(0)
    drafter.step_costs = [1.0 + row_cost * k for k in range(8)]
    sequence, num_used = sequence_of(0, [1], [2]), 0
    for step in range(600):
        draft = drafter.propose(sequence, 3)
        branches = drafter.propose_branches(sequence, draft, 3) if draft else []
        assert len(branches) <= 1
        num_used += bool(branches) and step >= 300
        is_right, is_second = rng.random() < 0.6, rng.random() < second
        sequence.tokens += [2]
        if branches and not is_right:
            drafter.record_branches(int(not is_second), is_right=is_second)
        if draft:
            drafter.record(sequence, len(draft), len(draft) if is_right else 0)
    assert num_used > 250 if used else num_used < 60


def test_a_single_draft_is_the_default() -> None:
    drafter, sequence = AdaptiveDrafter(Choices(), 3), sequence_of(0, [1], [2])
    drafter.step_costs = [1.0] * 4
    assert drafter.propose(sequence, 3)
    assert drafter.propose_branches(sequence, (0, 0, 0), 3) == []


def test_branches_that_did_not_pay_are_tried_again() -> None:
    drafter, sequence = AdaptiveDrafter(Choices(), 3, 2), sequence_of(0, [1], [2])
    drafter.step_costs = [1.0 + 0.005 * k for k in range(8)]
    tried = []
    for _ in range(1000):
        draft = drafter.propose(sequence, 3)
        assert draft
        tried.append(bool(drafter.propose_branches(sequence, draft, 3)))
        if tried[-1]:
            drafter.record_branches(1, is_right=False)
        drafter.record(sequence, 3, 1)
        sequence.tokens += [2]
    assert all(tried[:2])
    assert 0 < sum(tried[500:]) < 100
