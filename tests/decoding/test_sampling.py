"""From drawn tokens to edits: forks, appends, ends."""

from __future__ import annotations

from typing import Any

import pytest

from quire.memory import Namespace, TokenChain
from quire.memory.prefix.token_chain import root_of
from quire.sequences import FinishReason, Request, SamplingParams, Sequence
from quire.sequences.decoding import Append, Edit, Finish, Fork, Sampling, Truncate, end_of_tokens

END = 9


def sequence_with(
    num_output: int = 0,
    *,
    sample_idx: int = 0,
    max_total_tokens: int = 100,
    end_token_ids: frozenset[int] = frozenset({END}),
    **params: Any,
) -> Sequence:
    """Return a sequence of a three-token prompt and some output."""
    request = Request(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(**{"max_tokens": None, **params}),
        max_total_tokens=max_total_tokens,
        end_token_ids=end_token_ids,
        arrival=0,
        seed=0,
    )
    tokens = [1, 2, 3] + [4] * num_output
    chain = TokenChain(tokens, root_of(Namespace(), b""), 4)
    sequence = Sequence(0, request, sample_idx, tokens, chain, (0, 0, sample_idx), Sampling())
    request.sequences.append(sequence)
    return sequence


@pytest.mark.parametrize(
    ("token_id", "num_output", "changes", "end"),
    [
        (4, 0, {}, None),
        (END, 0, {}, (FinishReason.STOP, None)),
        (5, 0, {"stop_token_ids": (5, 6)}, (FinishReason.STOP, 5)),
        (6, 7, {"stop_token_ids": (5, 6)}, (FinishReason.STOP, 6)),
        (END, 0, {"stop_token_ids": (END,)}, (FinishReason.STOP, None)),
        (END, 1, {"min_tokens": 2}, None),
        (END, 2, {"min_tokens": 2}, (FinishReason.STOP, None)),
        (5, 1, {"min_tokens": 2, "stop_token_ids": (5,)}, None),
        (5, 2, {"min_tokens": 2, "stop_token_ids": (5,)}, (FinishReason.STOP, 5)),
        (4, 5, {"max_total_tokens": 10}, None),
        (4, 6, {"max_total_tokens": 10}, (FinishReason.LENGTH, None)),
        (4, 7, {"max_total_tokens": 10}, (FinishReason.LENGTH, None)),
        (END, 6, {"max_total_tokens": 10}, (FinishReason.STOP, None)),
        (END, 6, {"max_total_tokens": 10, "min_tokens": 7}, (FinishReason.LENGTH, None)),
    ],
)
def test_end_of_tokens(
    token_id: int, num_output: int, changes: dict[str, Any], end: tuple[FinishReason, int | None] | None
) -> None:
    assert end_of_tokens(sequence_with(num_output, **changes), token_id) == end


def test_without_end_tokens_only_the_length_ends() -> None:
    assert end_of_tokens(sequence_with(max_total_tokens=5, end_token_ids=frozenset()), END) is None


def test_a_single_sample_appends() -> None:
    assert Sampling().advance(sequence_with(3), (4,)) == [Append(0, 0)]


def test_forks_come_first_and_finishes_last() -> None:
    edits = Sampling().advance(sequence_with(n=3, stop_token_ids=(6,)), (END, 5, 6))
    assert edits == [
        Fork(1, 0),
        Fork(2, 0),
        Append(0, 0),
        Append(1, 1),
        Append(2, 2),
        Finish(0, FinishReason.STOP, None),
        Finish(2, FinishReason.STOP, 6),
    ]


def test_a_later_sample_edits_itself() -> None:
    assert Sampling().advance(sequence_with(2, sample_idx=2, n=3), (END,)) == [
        Append(2, 0),
        Finish(2, FinishReason.STOP, None),
    ]


@pytest.mark.parametrize(
    ("draft", "run", "edits"),
    [
        ((), (4, 5), [Append(0, 0), Append(0, 1)]),
        ((), (4, END, 5), [Append(0, 0), Append(0, 1), Finish(0, FinishReason.STOP, None)]),
        ((4, 5), (4, 5, 6), [Append(0, 0), Append(0, 1), Append(0, 2), Truncate(0, 6)]),
        ((4, 5), (4, 6), [Append(0, 0), Append(0, 1), Truncate(0, 5)]),
        ((4, 5), (6,), [Append(0, 0), Truncate(0, 4)]),
        # What a grammar forces behind the drafts is not computed, even where it looks like a draft.
        ((4,), (4, 5, 5), [Append(0, 0), Append(0, 1), Append(0, 2), Truncate(0, 5)]),
        ((4, 5), (6, 5), [Append(0, 0), Append(0, 1), Truncate(0, 4)]),
        ((END, 5), (END, 5, 6), [Append(0, 0), Truncate(0, 5), Finish(0, FinishReason.STOP, None)]),
        (
            (4, 4, 4, 4, 4),
            (4, 4, 4, 4, 4, 4),
            [*(Append(0, i) for i in range(4)), Truncate(0, 8), Finish(0, FinishReason.LENGTH, None)],
        ),
    ],
)
def test_runs(draft: tuple[int, ...], run: tuple[int, ...], edits: list[Edit]) -> None:
    sequence = sequence_with(1, max_total_tokens=8)
    sequence.draft = draft
    assert Sampling().advance(sequence, run) == edits


def test_a_prompt_is_drawn_from_once_for_each_sample() -> None:
    assert [Sampling().num_draws(sequence_with(n=n)) for n in (1, 4)] == [1, 4]
    assert Sampling().num_draws(sequence_with(1, n=4)) == 1
