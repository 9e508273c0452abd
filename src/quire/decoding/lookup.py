"""Prompt lookup: a sequence is guessed to go on as it did when it had its last few tokens before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from quire.sequences.sequence import Sequence

# Places that are looked at in search of a longer match: bounds the work for a text that says one thing over and over.
MAX_TRIES = 16
FIRST_SLOTS = 256


class NgramIndex:
    """Finds where the last tokens of a list occurred before; kept up to date as the list grows.

    Places with the same hash of their last `shortest` tokens are chained, the latest first. A place is compared token
    by token before it counts, so a collision costs time and nothing else.

    ```
     tokens   ... a b c d e ... a b c        the place behind the first c is found; d e may come next
                        ^
    ```

    Args:
        tokens: the list; its owner appends to it, and changes nothing else.
        shortest: tokens that must be alike.
        longest: more than so many need not be.

    Source: prompt lookup decoding (A. Saxena, 2023); the chains are those of LZ77 compressors.
    """

    __slots__ = ("_end", "_heads", "_longest", "_previous", "_shortest", "_tokens")

    def __init__(self, tokens: list[int], shortest: int, longest: int) -> None:
        self._tokens = tokens
        self._shortest = shortest
        self._longest = longest
        # By hash, the latest place; by place, the one before it. 0 is none.
        self._heads = array("i", bytes(4 * FIRST_SLOTS))
        self._previous = array("i", bytes(4 * shortest))
        self._end = shortest

    def find(self) -> tuple[int, int]:
        """Return the place behind the longest earlier match of the list's end, the latest of the longest; and how many
        tokens are alike. (0, 0) where there is none of `shortest`.
        """
        tokens, num_tokens = self._tokens, len(self._tokens)
        if num_tokens <= self._shortest:
            return 0, 0
        self._index_new_positions()
        place = self._heads[self._slot(num_tokens)]
        best_place, best = 0, self._shortest - 1
        for _ in range(MAX_TRIES):
            if not place:
                break
            # Not better than the best unless alike there; most candidates fail at this one look.
            if best < place and tokens[place - 1 - best] == tokens[num_tokens - 1 - best]:
                length = self._match(place, num_tokens)
                if length > best:
                    best_place, best = place, length
                    if length == self._longest:
                        break
            place = self._previous[place]
        return (best_place, best) if best_place else (0, 0)

    def continuation(self, place: int, limit: int) -> list[int]:
        """Return `limit` tokens from a place on; where the list ends before, it is taken to repeat itself."""
        draft = self._tokens[place : place + limit]
        period = len(self._tokens) - place
        while len(draft) < limit:
            draft.append(draft[-period])
        return draft

    def _match(self, place: int, num_tokens: int) -> int:
        """Return how many tokens before a place are those before the end."""
        tokens = self._tokens
        length, most = 0, min(place, self._longest)
        while length < most and tokens[place - 1 - length] == tokens[num_tokens - 1 - length]:
            length += 1
        return length

    def _index_new_positions(self) -> None:
        """Index the places that have a token behind them and are not indexed yet."""
        num_tokens = len(self._tokens)
        if num_tokens > len(self._heads):
            size = len(self._heads)
            while size < num_tokens:
                size *= 4
            self._heads = array("i", bytes(4 * size))
            self._previous = array("i", bytes(4 * self._shortest))
            self._end = self._shortest
        heads, previous = self._heads, self._previous
        for place in range(self._end, num_tokens):
            slot = self._slot(place)
            previous.append(heads[slot])
            heads[slot] = place
        self._end = max(self._end, num_tokens)

    def _slot(self, place: int) -> int:
        # Of whole numbers the hash is the same in every process.
        return hash(tuple(self._tokens[place - self._shortest : place])) & (len(self._heads) - 1)


class PromptLookup:
    """Drafts from a sequence's own tokens, prompt and output.

    Args:
        shortest: tokens at its end that must have occurred before.
        longest: of several places, one where so many are alike is as good as any.
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
        place, _ = index.find()
        return index.continuation(place, limit) if place else ()

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """See `Drafter`: nothing is learnt."""

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._indices.pop(sequence.seq_id, None)

    def reset(self) -> None:
        """See `Drafter`: nothing of a sequence outlives it."""
