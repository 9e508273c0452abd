"""Media in small worlds: tokens that remember which row of which medium they stand for, so that twins compare them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product

from quire.memory import MediaSpan
from quire.memory.prefix.prompt_embeddings import read_entries

# Digests of the media that there are; of different lengths, as nobody promises that they have one.
MEDIA = (b"fox", b"kite")

# By place: the digest of the medium there, and which row of it.
Rows = Mapping[int, tuple[bytes, int]]


class Row(int):
    """A token that stands for a row of a medium, equal only to the same token for the same row of the same medium."""

    medium: bytes
    row: int

    def __new__(cls, token_id: int, medium: bytes, row: int) -> Row:
        self = super().__new__(cls, token_id)
        self.medium, self.row = medium, row
        return self

    def __reduce__(self) -> tuple[type[Row], tuple[int, bytes, int]]:
        return Row, (int(self), self.medium, self.row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return False
        return (int(self), self.medium, self.row) == (int(other), other.medium, other.row)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.medium, self.row))


class Words(list[int]):
    """A sequence's tokens; what comes to a place of media, first or again, is a row.

    Args:
        tokens: plain, or rows already.
        rows: what the places stand for.
    """

    def __init__(self, tokens: Iterable[int], rows: Rows) -> None:
        super().__init__(tokens)
        self.rows = dict(rows)
        self[:] = map(self._as_word, range(len(self)), list(self))

    def __reduce__(self) -> tuple[type[Words], tuple[list[int], Rows]]:  # type: ignore[override]
        return Words, (list(self), self.rows)

    def append(self, token_id: int) -> None:
        super().append(self._as_word(len(self), token_id))

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.append(token_id)

    def __iadd__(self, token_ids: Iterable[int]) -> Words:  # type: ignore[override, misc]
        self.extend(token_ids)
        return self

    def _as_word(self, place: int, token_id: int) -> int:
        return Row(int(token_id), *self.rows[place]) if place in self.rows else token_id


def like(tokens: Sequence[int], new_tokens: Iterable[int]) -> list[int]:
    """Return further tokens as a sequence's own, with media in the same places."""
    return Words(new_tokens, tokens.rows) if isinstance(tokens, Words) else list(new_tokens)


def with_media(tokens: Sequence[int], spans: Iterable[MediaSpan]) -> list[int]:
    """Return tokens of which some stand for media; plain ones where no span touches them."""
    rows = {place: (span.digest, place - span.start) for span in spans for place in range(span.start, span.end)}
    rows = {place: row for place, row in rows.items() if 0 <= place < len(tokens)}
    return Words(tokens, rows) if rows else list(tokens)


def laid_out(tokens: Sequence[int], runs: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Return tokens with media one behind the other: plain tokens before it, its rows, and its digest for each."""
    spans, end = [], 0
    for gap, num_tokens, medium in runs:
        spans.append(MediaSpan(end + gap, num_tokens, medium))
        end = spans[-1].end
    return with_media(tokens, spans)


def random_media(rng: random.Random, tokens: Sequence[int]) -> list[int]:
    """Return tokens with up to two media among them."""
    runs = [(rng.randrange(4), rng.randrange(1, 6), rng.choice(MEDIA)) for _ in range(rng.choice((0, 1, 1, 2)))]
    return laid_out(tokens, runs)


def all_prompts(vocabulary: Sequence[int], length: int) -> Iterator[list[int]]:
    """Yield every prompt of `length` tokens that holds one medium."""
    for gap, num_tokens, medium in product(range(length), range(1, length + 1), MEDIA):
        if gap + num_tokens <= length:
            for before, after in product(
                product(vocabulary, repeat=gap), product(vocabulary, repeat=length - gap - num_tokens)
            ):
                tokens = (*before, *(vocabulary[0] for _ in range(num_tokens)), *after)
                yield laid_out(tokens, [(gap, num_tokens, medium)])


def spans_of(tokens: Sequence[int]) -> list[MediaSpan]:
    """Return the spans that tokens stand for."""
    found = {place: (word.medium, word.row) for place, word in enumerate(tokens) if isinstance(word, Row)}
    rows = tokens.rows if isinstance(tokens, Words) else found
    spans = groupby(sorted(rows), key=lambda place: (rows[place][0], place - rows[place][1]))
    return [MediaSpan(start, len(list(places)), medium) for (medium, start), places in spans]


def renamed(token_id: int, flip: int) -> int:
    """Return a number for a token where names make no difference.

    Args:
        token_id: 0 or 1, or a row.
        flip: 1 swaps the two tokens, 2 the two media, 3 both.
    """
    if not isinstance(token_id, Row):
        return token_id ^ (flip & 1)
    return 100 + 100 * (MEDIA.index(token_id.medium) ^ (flip >> 1)) + 10 * token_id.row + (int(token_id) ^ (flip & 1))


def words_of(content: bytes, block_size: int) -> list[int]:
    """Return the tokens of a link's content, rows where it says so."""
    size = 4 * block_size
    return with_media(array("I", content[:size]), read_entries(content[size:]))
