"""Log probabilities of many positions in a few arrays: 12 bytes per entry instead of 250 for an object.

Outputs hold these sequences; a position becomes a dictionary of `Logprob` on access.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, overload

from quire.sequences.logprobs import TokenLogprobs
from quire.text.tokenizers.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """The log probability of one token at one position, from the raw model distribution.

    Args:
        logprob: natural logarithm, at most 0.
        rank: 1 for the likeliest token of the position.
        decoded_token: the token's own text (with a replacement character if the token is part of a character), or None
            if the engine has no tokenizer.
        decoded_bytes: the token's own bytes, or None if the engine has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    decoded_bytes: bytes | None = None


# One position: token id -> Logprob; the chosen token is always in it and always comes first.
PositionLogprobs = dict[int, Logprob]


class FlatLogprobs(Sequence[PositionLogprobs]):
    """The log probabilities of the tokens of an output, position by position.

    Args:
        tokenizer: tokenizer for the texts of tokens; None leaves the texts out.
    """

    __slots__ = ("_ends", "_logprobs", "_ranks", "_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        # For each position the chosen token, then the likeliest ones; `_ends` has the end index of each position.
        self._token_ids = array("i")
        self._logprobs = array("d")
        self._ends = array("q")
        self._ranks = array("i")

    def append(self, position: TokenLogprobs) -> None:
        """Add a position."""
        self._token_ids.append(position.token_id)
        self._logprobs.append(position.logprob)
        self._ranks.append(position.rank)
        self._token_ids += position.top_ids
        self._logprobs += position.top_logprobs
        self._ends.append(len(self._token_ids))

    def extend(self, other: FlatLogprobs) -> None:
        """Add the positions of another sequence."""
        start = len(self._token_ids)
        self._token_ids += other._token_ids
        self._logprobs += other._logprobs
        self._ranks += other._ranks
        self._ends.extend(start + end for end in other._ends)

    def copy(self) -> FlatLogprobs:
        """Return an independent copy."""
        copied = FlatLogprobs(self._tokenizer)
        copied.extend(self)
        return copied

    def measured(self) -> Iterator[TokenLogprobs]:
        """Yield the positions as they were measured, without the texts of tokens."""
        start = 0
        for rank, end in zip(self._ranks, self._ends, strict=True):
            ids, logprobs = self._token_ids[start:end], self._logprobs[start:end]
            yield TokenLogprobs(ids[0], logprobs[0], rank, ids[1:], logprobs[1:])
            start = end

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: SupportsIndex) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> PositionLogprobs | list[PositionLogprobs]:
        indices = range(len(self))[index]
        return self._position(indices) if isinstance(indices, int) else [self._position(index) for index in indices]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def _position(self, index: int) -> PositionLogprobs:
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        chosen = self._token_ids[start]
        position = {chosen: self._logprob(start, self._ranks[index])}
        for rank, idx in enumerate(range(start + 1, end), 1):
            if self._token_ids[idx] != chosen:
                position[self._token_ids[idx]] = self._logprob(idx, rank)
        return position

    def _logprob(self, idx: int, rank: int) -> Logprob:
        value = self._logprobs[idx]
        if self._tokenizer is None:
            return Logprob(value, rank)
        data = self._tokenizer.token_bytes(self._token_ids[idx])
        return Logprob(value, rank, data.decode("utf-8", "replace"), data)


class PromptLogprobs(Sequence[PositionLogprobs | None]):
    """The log probabilities of the tokens of a prompt; None for the first token, which has no predecessor.

    Args:
        flat: log probabilities of the other tokens.
    """

    __slots__ = ("flat",)

    def __init__(self, flat: FlatLogprobs) -> None:
        self.flat = flat

    def add(self, positions: Iterable[TokenLogprobs]) -> None:
        """Add positions."""
        for position in positions:
            self.flat.append(position)

    def measured(self) -> Iterator[TokenLogprobs | None]:
        """Yield the positions as they were measured, without the texts of tokens."""
        yield None
        yield from self.flat.measured()

    def __len__(self) -> int:
        return 1 + len(self.flat)

    @overload
    def __getitem__(self, index: SupportsIndex) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs | None]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> PositionLogprobs | list[PositionLogprobs | None] | None:
        indices = range(len(self))[index]
        if isinstance(indices, int):
            return self.flat[indices - 1] if indices else None
        return [self[index] for index in indices]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))
