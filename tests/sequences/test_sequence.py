"""Sequences and requests: counts, and changes of status that are allowed."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvariantViolation
from quire.memory import Namespace, TokenChain
from quire.memory.prefix.token_chain import root_of
from quire.sequences import Request, SamplingParams, Sequence, SequenceStatus
from quire.sequences.decoding import Sampling

WAITING, RUNNING = SequenceStatus.WAITING, SequenceStatus.RUNNING
SWAPPED, FINISHED = SequenceStatus.SWAPPED, SequenceStatus.FINISHED

ALLOWED = {
    *((WAITING, new) for new in (RUNNING, FINISHED)),
    *((RUNNING, new) for new in (WAITING, SWAPPED, FINISHED)),
    *((SWAPPED, new) for new in (WAITING, RUNNING, FINISHED)),
}
# The way to each status.
WAYS = {WAITING: (), RUNNING: (RUNNING,), SWAPPED: (RUNNING, SWAPPED), FINISHED: (FINISHED,)}


def request_with(**params: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=[1, 2, 3, 4],
        params=SamplingParams(**params),
        max_total_tokens=20,
        end_token_ids=frozenset({9}),
        arrival=0,
        seed=0,
    )


def sequence_of(request: Request, *output: int) -> Sequence:
    tokens = [*request.prompt_token_ids, *output]
    idx = len(request.sequences)
    chain = TokenChain(tokens, root_of(Namespace(), b""), 2)
    sequence = Sequence(idx, request, idx, tokens, chain, (0, 0, idx), Sampling())
    request.sequences.append(sequence)
    return sequence


def test_counts() -> None:
    sequence = sequence_of(request_with(), 7, 8)
    sequence.num_computed = 5
    assert (sequence.num_prompt, sequence.num_output, sequence.num_pending) == (4, 2, 1)
    assert sequence.output_token_ids == [7, 8]


@pytest.mark.parametrize("old", list(SequenceStatus))
@pytest.mark.parametrize("new", list(SequenceStatus))
def test_S5_status_changes(old: SequenceStatus, new: SequenceStatus) -> None:
    sequence = sequence_of(request_with())
    for status in WAYS[old]:
        sequence.move_to(status)
    if (old, new) not in ALLOWED:
        with pytest.raises(InvariantViolation, match=f"S5: sequence 0 cannot go from {old.value} to {new.value}"):
            sequence.move_to(new)
        new = old
    else:
        sequence.move_to(new)
    assert (sequence.status, sequence.is_finished) == (new, new is FINISHED)


def test_a_request_is_finished_when_all_its_sequences_are() -> None:
    request = request_with(n=2)
    assert not request.is_finished, "it has not begun"
    first = sequence_of(request)
    second = sequence_of(request)
    seen = [(request.is_forked, request.is_finished)]
    first.move_to(FINISHED)
    seen.append((request.is_forked, request.is_finished))
    second.move_to(FINISHED)
    seen.append((request.is_forked, request.is_finished))
    assert seen == [(True, False), (True, False), (True, True)]


def test_a_request_that_ends_before_it_forks_is_finished() -> None:
    request = request_with(n=2)
    sequence_of(request).move_to(FINISHED)
    assert (request.is_forked, request.is_finished) == (False, True)


def test_suppressed_ids() -> None:
    assert request_with(stop_token_ids=(5,)).suppressed_ids == ()
    assert request_with(min_tokens=1, stop_token_ids=(12, 5)).suppressed_ids == (5, 9, 12)


def test_hit_limit_grows_with_the_prompt_logprobs_that_are_known() -> None:
    assert request_with().hit_limit is None
    request = request_with(prompt_logprobs=0)
    limits = []
    for known in range(4):
        request.num_known_prompt_logprobs = known
        limits.append(request.hit_limit)
    assert limits == [0, 1, 2, None]
