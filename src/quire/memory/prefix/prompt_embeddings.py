"""Media in a sequence: placeholder tokens of an image, for example, whose keys and values depend on the image.

```
 tokens   | a b | m m m m m m m m | c d e |        m: any token id, of a span of 8 that starts at 2
 blocks   [ a b   m m ][ m m m m ][ m m   c d ]
           starts at 2  at -2      at -6             start of the span in the block
```

A block's media entries, one for each span that overlaps it, follow its tokens and are hashed and compared with them.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

# Tag and number of bytes of the digest. The digest follows, then start and end of the span in the block.
_HEAD = Struct("<1sQ")
_SPAN = Struct("<qq")
_TAG = b"m"


class MediaSpan(NamedTuple):
    """A run of positions with placeholder tokens of media; the token ids there have no meaning.

    Args:
        start: first position.
        num_tokens: number of positions.
        digest: digest of the media; the caller ensures that different media have different digests.
    """

    start: int
    num_tokens: int
    digest: bytes

    @property
    def end(self) -> int:
        """Position after the last position of the span."""
        return self.start + self.num_tokens

    def entry(self, start: int, end: int) -> bytes:
        """Return the entry of the block of tokens `[start, end)`, which overlaps the span; different spans differ."""
        span = _SPAN.pack(self.start - start, min(self.end, end) - start)
        return _HEAD.pack(_TAG, len(self.digest)) + self.digest + span


def read_entries(entries: bytes) -> list[MediaSpan]:
    """Return the spans of a block's entries, with starts relative to the block and ends within it."""
    spans, offset = [], 0
    while offset < len(entries):
        head = entries[offset : offset + _HEAD.size]
        tag, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0)
        start = offset + _HEAD.size + length
        offset = start + _SPAN.size
        if tag != _TAG or offset > len(entries):
            raise ValueError(f"entries must be encoded media entries, got {entries!r}")
        first, end = _SPAN.unpack(entries[start:offset])
        spans.append(MediaSpan(first, end - first, entries[start - length : start]))
    return spans
