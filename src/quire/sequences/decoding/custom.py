"""Validation of a custom decoding strategy.

Every error becomes a `Fail`, which ends the request: an exception, an invalid number of draws, an edit of a sample that
does not exist or has ended, a token past the request's limits, a sequence without a token to compute. Each edit is
checked when it is taken, after the edits before it have been applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from quire.errors import describe
from quire.sequences.params import MAX_N
from quire.sequences.sequence import Sequence
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Append, Edit, Fail, Finish, Fork, Strategy

# Only the engine sets the other reasons.
REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT})


class CustomStrategy:
    """Wrapper that calls a request's own strategy and validates its edits."""

    __slots__ = ("_failure", "_strategy")

    def __init__(self, strategy: Strategy[Sequence]) -> None:
        self._strategy = strategy
        self._failure: Fail | None = None

    def num_draws(self, sequence: Sequence) -> int:
        """Return the number of tokens to draw; 1 if the strategy's number is invalid: then `advance` fails."""
        try:
            count = self._strategy.num_draws(sequence)
        except Exception as error:
            self._failure = Fail(f"the strategy raised {describe(error)}")
            return 1
        if not _is_in(count, range(1, MAX_N + 1)):
            self._failure = Fail(f"the strategy's num_draws must return 1 to {MAX_N}, got {_shown(count)}")
            return 1
        return count

    def advance(self, sequence: Sequence, token_ids: Seq[int]) -> Iterator[Edit]:
        """Yield the strategy's edits, each after the previous one was applied; after an error, a `Fail` and no more."""
        if self._failure is not None:
            yield self._failure
            return
        request = sequence.request
        targets = [sequence.sample_idx]  # samples that may receive the step's tokens: the sequence and its forks
        try:
            for edit in self._strategy.advance(sequence, token_ids):
                refusal = _refusal(edit, sequence, targets, len(token_ids))
                if refusal is not None:
                    yield Fail(f"the strategy returned {_shown(edit)}: {refusal}")
                    return
                yield edit
                if isinstance(edit, Fail):
                    return
                if isinstance(edit, Fork):
                    targets.append(edit.sample_idx)
        except Exception as error:
            yield Fail(f"the strategy raised {describe(error)}")
            return
        for sample in (request.sequences[idx] for idx in targets):
            if not sample.is_finished and not sample.num_pending:
                yield Fail(f"the strategy gave sample {sample.sample_idx} neither a token nor an end")
                return


def _refusal(edit: Any, sequence: Sequence, targets: list[int], num_tokens: int) -> str | None:
    """Return the reason why an edit is invalid, None for a valid one."""
    samples = sequence.request.sequences
    if isinstance(edit, Fork):
        return _refusal_of_fork(edit, sequence, targets)
    if isinstance(edit, Fail):
        return None if _is_a(edit.error, str) else "the error must be text"
    if not isinstance(edit, Append | Finish):
        return "an edit is an Append, a Fork, a Finish or a Fail"
    if not _is_in(edit.sample_idx, range(len(samples))) or samples[edit.sample_idx].is_finished:
        return "no such sample is running"
    if isinstance(edit, Finish):
        if not _is_a(edit.reason, FinishReason) or edit.reason not in REASONS:
            return f"the reason must be one of {', '.join(sorted(reason.name for reason in REASONS))}"
        return None if _is_a(edit.stop_reason, str, int, type(None)) else "the stop_reason must be text or a token id"
    sample = samples[edit.sample_idx]
    if edit.sample_idx not in targets:
        return f"the step's tokens are for sample {sequence.sample_idx} and its forks of this step"
    if not _is_in(edit.draw_idx, range(num_tokens)):
        return f"the step gave {num_tokens} token{'s' * (num_tokens != 1)}"
    if len(sample.tokens) >= sample.max_tokens:
        return f"prompt and output have {sample.max_tokens} tokens, which is the limit"
    return None


def _refusal_of_fork(edit: Fork, sequence: Sequence, targets: list[int]) -> str | None:
    request = sequence.request
    samples, limit = request.sequences, request.params.num_sequences
    is_target = _is_in(edit.parent_idx, targets)
    if not is_target or samples[edit.parent_idx].is_finished or samples[edit.parent_idx].num_output:
        return "only a sample of this step can be forked, before it has output"
    if len(samples) == limit:
        return f"the request has all of its samples (n is {limit})"
    if not _is_in(edit.sample_idx, range(len(samples), len(samples) + 1)):
        return f"the next sample is {len(samples)}"
    return None


def _is_in(value: object, allowed: Seq[int]) -> bool:
    """Return whether a value is an allowed integer; True and 1.0 are not integers here, although they equal 1."""
    return type(value) is int and value in allowed


def _is_a(value: object, *types: type) -> bool:
    """Return whether a value has one of the types; a strategy may violate the declared type of a field."""
    return isinstance(value, types)


def _shown(value: object) -> str:
    """Return a value of a strategy as text for an error message; its `__repr__` may raise."""
    try:
        text = repr(value)
    except Exception:
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."
