"""Prompt lookup: the drafts are the tokens that followed an earlier occurrence of the sequence's last tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from quire.sequences.sequence import Sequence

# Maximum number of positions compared in one search, which bounds the work for repetitive texts.
MAX_TRIES = 16
FIRST_SLOTS = 256


class NgramIndex:
    """Index of a growing list of tokens, which finds earlier occurrences of its last tokens.

    Positions with the same hash of the `shortest` tokens before them are chained, the latest first. Tokens are compared
    before a position counts as a match, so a hash collision costs time only.

    ```
     tokens   ... a b c d e ... a b c        the position after the first c is found; d e may come next
                        ^
    ```

    Source: prompt lookup decoding (A. Saxena, 2023); hash chains as in LZ77 compressors.
    """

    __slots__ = ("_end", "_heads", "_longest", "_previous", "_shortest", "_tokens")

    def __init__(self, tokens: list[int], shortest: int, longest: int) -> None:
        self._tokens = tokens
        self._shortest = shortest
        self._longest = longest
        # The latest position by hash, and the previous position of the chain by position. 0 is none.
        self._heads = array("i", bytes(4 * FIRST_SLOTS))
        self._previous = array("i", bytes(4 * shortest))
        self._end = shortest

    def find(self) -> tuple[int, int]:
        """Return the position after the longest earlier match of the last tokens, and the length of the match.

        Of several matches of that length it is the latest. (0, 0) if no match has `shortest` tokens.
        """
        tokens, num_tokens = self._tokens, len(self._tokens)
        if num_tokens <= self._shortest:
            return 0, 0
        self._index_new_positions()
        position = self._heads[self._slot(num_tokens)]
        best_position, best = 0, self._shortest - 1
        for _ in range(MAX_TRIES):
            if not position:
                break
            # A longer match has the same token at this offset; most candidates fail this single comparison.
            if best < position and tokens[position - 1 - best] == tokens[num_tokens - 1 - best]:
                length = self._match(position, num_tokens)
                if length > best:
                    best_position, best = position, length
                    if length == self._longest:
                        break
            position = self._previous[position]
        return (best_position, best) if best_position else (0, 0)

    def continuation(self, position: int, limit: int) -> list[int]:
        """Return `limit` tokens from a position on; past the end of the list these tokens repeat."""
        draft = self._tokens[position : position + limit]
        period = len(self._tokens) - position
        while len(draft) < limit:
            draft.append(draft[-period])
        return draft

    def _match(self, position: int, num_tokens: int) -> int:
        """Return the number of equal tokens before a position and before the end of the list."""
        tokens = self._tokens
        length, most = 0, min(position, self._longest)
        while length < most and tokens[position - 1 - length] == tokens[num_tokens - 1 - length]:
            length += 1
        return length

    def _index_new_positions(self) -> None:
        """Index the new positions that are followed by a token."""
        num_tokens = len(self._tokens)
        if num_tokens > len(self._heads):
            size = len(self._heads)
            while size < num_tokens:
                size *= 4
            self._heads = array("i", bytes(4 * size))
            self._previous = array("i", bytes(4 * self._shortest))
            self._end = self._shortest
        heads, previous = self._heads, self._previous
        for position in range(self._end, num_tokens):
            slot = self._slot(position)
            previous.append(heads[slot])
            heads[slot] = position
        self._end = max(self._end, num_tokens)

    def _slot(self, position: int) -> int:
        # The hash of integers is the same in every process.
        return hash(tuple(self._tokens[position - self._shortest : position])) & (len(self._heads) - 1)


class PromptLookup:
    """Drafts from a sequence's own tokens, prompt and output.

    Args:
        shortest: minimum length of a match.
        longest: match length at which the search for a longer match stops.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        """See `Drafter`."""
        index = self._indices.get(sequence.seq_id)
        if index is None:
            index = self._indices[sequence.seq_id] = NgramIndex(sequence.tokens, self._shortest, self._longest)
        position, _ = index.find()
        return index.continuation(position, limit) if position else ()

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: earlier results are not used."""

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._indices.pop(sequence.seq_id, None)

    def reset(self) -> None:
        """Do nothing: no state outlives its sequence."""
