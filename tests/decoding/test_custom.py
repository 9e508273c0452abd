"""Custom strategies: each edit is checked against the state that the edits before it left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Tokens
from typing import Any

import pytest

from quire.sequences import FinishReason, Sequence, SequenceStatus
from quire.sequences.decoding import Append, Drop, Edit, Fail, Finish, Fork, Truncate, strategy_of
from quire.sequences.decoding.custom import CustomStrategy
from quire.sequences.params import MAX_N
from tests.decoding.test_sampling import sequence_with

STOP = FinishReason.STOP


class Own:
    """A strategy of two functions."""

    def __init__(self, advance: Callable[[Sequence], Any], draws: Callable[[Sequence], Any] = lambda _: 1) -> None:
        self.num_draws = draws
        self._advance = advance

    def advance(self, sequence: Sequence, token_ids: Tokens[int]) -> Any:  # noqa: ARG002
        return self._advance(sequence)


def made(strategy: CustomStrategy, sequence: Sequence, token_ids: tuple[int, ...] = (7,)) -> list[Edit]:
    """Return the edits of a step, each made as the scheduler makes it."""
    samples, edits = sequence.request.sequences, []
    sequence.num_computed = len(sequence.tokens)
    for edit in strategy.advance(sequence, token_ids):
        edits.append(edit)
        if isinstance(edit, Append):
            samples[edit.sample_idx].tokens.append(token_ids[edit.draw_idx])
        elif isinstance(edit, Fork):
            child = sequence_with(sample_idx=edit.sample_idx)
            child.num_computed = len(child.tokens)
            samples.append(child)
        elif isinstance(edit, Finish):
            samples[edit.sample_idx].status = SequenceStatus.FINISHED
    return edits


def after(edits: Any, num_output: int = 0, token_ids: tuple[int, ...] = (7,), **params: Any) -> list[Edit]:
    """Return what comes of a strategy that returns edits, of which a function makes them."""
    advance = edits if callable(edits) else lambda _: edits
    return made(CustomStrategy(Own(advance)), sequence_with(num_output, **params), token_ids)


def untyped(edit: Callable[..., Edit], *fields: object) -> Edit:
    """Return an edit whose fields may have values that its types do not allow."""
    return edit(*fields)


def late(_: Sequence) -> Iterator[Edit]:
    yield Append(0, 0)
    raise LookupError("late")


def without_words(_: Sequence) -> Iterable[Edit]:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise TypeError

    raise Unspeakable


class Unshowable:
    def __repr__(self) -> str:
        raise TypeError


def test_a_request_with_a_strategy_of_its_own_is_asked_through_a_check() -> None:
    request = sequence_with(strategy=Own(lambda _: [])).request
    assert isinstance(strategy_of(request), CustomStrategy)
    assert not isinstance(strategy_of(sequence_with().request), CustomStrategy)


@pytest.mark.parametrize(
    "edits",
    [
        [Append(0, 0)],
        [Append(0, 1), Append(0, 0)],
        [Finish(0, STOP, "enough")],
        [Append(0, 0), Finish(0, FinishReason.LENGTH)],
        [Finish(0, FinishReason.ABORT, 17)],
        [Fork(1, 0), Fork(2, 1), Append(2, 1), Append(0, 0), Append(1, 1)],
        [Fork(1, 0), Append(1, 0), Append(0, 0), Finish(1, STOP)],
        [Append(0, 0), Fail("enough")],
    ],
)
def test_edits_that_can_be_made_are_passed_on(edits: list[Edit]) -> None:
    assert after(iter(edits), token_ids=(7, 8), n=3) == edits


@pytest.mark.parametrize(
    ("edits", "num_before", "said"),
    [
        (late, 1, "the strategy raised LookupError: late"),
        (without_words, 0, "the strategy raised Unspeakable"),
        (None, 0, "the strategy raised TypeError"),
        ([], 0, "the strategy gave sample 0 neither a token nor an end"),
        ([Fork(1, 0), Append(0, 0)], 2, "the strategy gave sample 1 neither a token nor an end"),
        ([Fork(1, 0), Append(1, 0)], 2, "the strategy gave sample 0 neither a token nor an end"),
        ([Append(1, 0)], 0, "no such sample is running"),
        ([Append(-1, 0)], 0, "no such sample is running"),
        ([untyped(Append, 0.0, 0)], 0, "no such sample is running"),
        ([Finish(0, STOP), Append(0, 0)], 1, "no such sample is running"),
        ([Finish(0, STOP), Finish(0, STOP)], 1, "no such sample is running"),
        ([Append(0, 1)], 0, "the step gave 1 token"),
        ([Append(0, True)], 0, "the step gave 1 token"),
        ([Append(0, 0)] * 9, 7, "have 10 tokens, which is the limit"),
        ([untyped(Finish, 0, "stop")], 0, "the reason must be one of ABORT, LENGTH, STOP"),
        ([Finish(0, FinishReason.DROPPED)], 0, "the reason must be one of ABORT, LENGTH, STOP"),
        ([untyped(Finish, 0, STOP, 0.5)], 0, "the stop_reason must be text or a token id"),
        ([Fork(2, 0)], 0, "the next sample is 1"),
        ([Fork(0, 0)], 0, "the next sample is 1"),
        ([Fork(1, 1)], 0, "before it has output"),
        ([Append(0, 0), Fork(1, 0)], 1, "before it has output"),
        ([Finish(0, STOP), Fork(1, 0)], 1, "before it has output"),
        ([Fork(1, 0), Fork(2, 0), Fork(3, 0)], 2, "the request has all of its samples (n is 3)"),
        ([Truncate(0, 3)], 0, "an edit is an Append, a Fork, a Finish or a Fail"),
        ([Drop(0)], 0, "an edit is an Append, a Fork, a Finish or a Fail"),
        (["x" * 999], 0, "xxx...: an edit is"),
        ([Unshowable()], 0, "an object of Unshowable: an edit is"),
        ([untyped(Fail, 3)], 0, "the error must be text"),
    ],
)
def test_what_cannot_be_done_fails(edits: Any, num_before: int, said: str) -> None:
    *before, last = after(edits, n=3, max_total_tokens=10)
    assert len(before) == num_before
    assert isinstance(last, Fail)
    assert said in last.error


def test_another_samples_tokens_are_not_given() -> None:
    sequence = sequence_with(1, n=2)
    other = sequence_with(1, sample_idx=1)
    sequence.request.sequences.append(other)
    (failure,) = made(CustomStrategy(Own(lambda _: [Append(1, 0)])), sequence)
    assert isinstance(failure, Fail)
    assert "are for sample 0 and its forks" in failure.error
    assert made(CustomStrategy(Own(lambda _: [Append(0, 0), Finish(1, STOP)])), sequence)[-1] == Finish(1, STOP)


@pytest.mark.parametrize("draws", [1, 3, MAX_N])
def test_draws_are_passed_on(draws: int) -> None:
    strategy = CustomStrategy(Own(lambda _: [Append(0, 0)], lambda _: draws))
    sequence = sequence_with()
    assert strategy.num_draws(sequence) == draws
    assert made(strategy, sequence) == [Append(0, 0)]


@pytest.mark.parametrize("draws", [0, -1, None, "3", 2.0, True, MAX_N + 1, 10**9, LookupError("no idea")], ids=str)
def test_draws_that_cannot_be_drawn_fail_with_the_step(draws: Any) -> None:
    def num_draws(_: Sequence) -> Any:
        if isinstance(draws, Exception):
            raise draws
        return draws

    strategy = CustomStrategy(Own(lambda _: [Append(0, 0)], num_draws))
    sequence = sequence_with()
    assert strategy.num_draws(sequence) == 1
    (failure,) = made(strategy, sequence)
    assert isinstance(failure, Fail)
    assert ("no idea" if isinstance(draws, Exception) else "num_draws must return 1 to 128") in failure.error
