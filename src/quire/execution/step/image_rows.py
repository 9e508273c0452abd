"""Rows of images in a step: the positions by which their heads are rotated, and which of them see each other.

Of models whose images have rows and columns:

```
 tokens     | a  b | m00 m01 m02 m10 m11 m12 | c  d |     an image of 2 rows and 3 columns
 time       | 0  1 |  2   2   2   2   2   2  | 5  6 |     the text goes on after max(rows, columns)
 row        | 0  1 |  2   2   2   3   3   3  | 5  6 |
 column     | 0  1 |  2   3   4   2   3   4  | 5  6 |
```

A token's index decides what it sees; these numbers only turn its heads. Those of a text differ from its index by one
number, so a step without rows of images has one position for each row.

Source: M-RoPE, Qwen2-VL, arXiv 2409.12191.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.models.modules.image_attention import JointRows
from quire.scheduling.plan import ScheduledSequence
from quire.sequences.media import Media


def image_positions(
    positions: Tensor,
    items: Sequence[ScheduledSequence],
    row_starts: Sequence[int],
    media: Mapping[int, tuple[Media, ...]],
) -> Tensor:
    """Return the positions of rows after and in images.

    Args:
        positions: [T] of int64 on the host, the index of each row in its sequence.
        items: items of the step.
        row_starts: first row of each item.
        media: media of open sequences, in the order of their spans.

    Returns:
        [T] of int64; [3, T] (time, row, column) in a step with rows of images.
    """
    found = [(item, row) for item, row in zip(items, row_starts, strict=False) if item.seq_id in media]
    if not any(one.grid is not None for item, _ in found for one in media[item.seq_id]):
        return positions
    result = positions.expand(3, -1).clone()
    is_plain = True
    for item, first_row in found:
        start, end = item.start, item.start + len(item.token_ids)
        shift = 0
        for span, _, grid, _ in media[item.seq_id]:
            if grid is None or span.start >= end:
                continue
            rows, columns = grid
            first, last = max(span.start, start), min(span.end, end)
            if first < last:
                places = torch.arange(first - span.start, last - span.start)
                part = result[:, first_row + first - start : first_row + last - start]
                part[:] = torch.stack((places * 0, places // columns, places % columns)) + (span.start + shift)
                is_plain = False
            change = max(rows, columns) - span.num_tokens
            shift += change
            if span.end < end:
                result[:, first_row + max(span.end, start) - start : first_row + end - start] += change
    return result[0] if is_plain else result


def joint_rows(
    items: Sequence[ScheduledSequence], row_starts: Sequence[int], media: Mapping[int, tuple[Media, ...]]
) -> list[JointRows]:
    """Return the rows of images that see each other; see `image_positions`."""
    found: list[JointRows] = []
    for idx, (item, row_start) in enumerate(zip(items, row_starts, strict=False)):
        end = item.start + len(item.token_ids)
        for one in media.get(item.seq_id, ()):
            first, last = max(one.span.start, item.start), min(one.span.end, end)
            if one.sees_itself and first < last:
                assert one.span.end <= end, "a step ends inside an image"
                shift = row_start - item.start
                found.append(JointRows(idx, first + shift, last + shift, first, one.span.end))
    return found
