"""Media in a sequence: tokens that stand for something else, an image say, on which their KV depends.

```
 tokens   | a b | m m m m m m m m | c d e |        m: any token id, of a span of 8 that starts at 2
 blocks   [ a b   m m ][ m m m m ][ m m   c d ]
           starts at 2  at -2      at -6             where the span starts in the block
```

What a block keeps of its media lies behind its tokens, so that it is hashed and compared with them: an entry for each
span that touches it.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

# A tag and the bytes of the digest; behind that, where the span starts and ends in the block.
_HEAD = Struct("<1sQ")
_PLACE = Struct("<qq")
_TAG = b"m"


class MediaSpan(NamedTuple):
    """A run of tokens that stand for media. It belongs to these places, whatever tokens are there.

    Args:
        start: the first of them.
        num_tokens: how many.
        digest: of the media; whoever computes it sees to it that different media have different ones.
    """

    start: int
    num_tokens: int
    digest: bytes

    @property
    def end(self) -> int:
        """The first token behind it."""
        return self.start + self.num_tokens

    def entry(self, start: int, end: int) -> bytes:
        """Return what the block of tokens `[start, end)` keeps of a span that touches it; no two encode alike."""
        place = _PLACE.pack(self.start - start, min(self.end, end) - start)
        return _HEAD.pack(_TAG, len(self.digest)) + self.digest + place


def read_entries(entries: bytes) -> list[MediaSpan]:
    """Return the spans of a block's entries, with starts relative to the block and ends within it.

    Raises:
        ValueError: these are no entries.
    """
    spans, place = [], 0
    while place < len(entries):
        head = entries[place : place + _HEAD.size]
        tag, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0)
        start = place + _HEAD.size + length
        place = start + _PLACE.size
        if tag != _TAG or place > len(entries):
            raise ValueError(f"{entries!r} is not what a block keeps of media")
        first, end = _PLACE.unpack(entries[start:place])
        spans.append(MediaSpan(first, end - first, entries[start - length : start]))
    return spans
