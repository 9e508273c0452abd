"""Items with several tokens as decodes of one token each, for captured steps, which have one token per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.scheduling.decode_columns import DecodeItems
from quire.scheduling.plan import ScheduledSequence

# Maximum number of tokens of a sequence that are computed as decodes: the most drafts, and tokens before them.
MOST_ROWS: Final = 64


def rows_of(items: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return a decode of one token for each token of items, whose block tables have been updated already.

    A decode sees earlier tokens of the same step, as all keys and values of the step are stored before attention reads
    any.
    """
    return [
        ScheduledSequence(item.seq_id, item.start + idx, (token_id,), (), item.num_samples, None)
        for item in items
        for idx, token_id in enumerate(item.token_ids)
    ]


def few_rows_of(items: Sequence[ScheduledSequence]) -> tuple[Sequence[ScheduledSequence], list[int] | None] | None:
    """Return items as decodes, and the number of decodes of each sequence; None if an item has too many tokens."""
    if isinstance(items, DecodeItems):
        return items, None
    counts = [len(item.token_ids) for item in items]
    most = max(counts)
    if most == 1:
        return items, None
    return (rows_of(items), counts) if most <= MOST_ROWS else None


def drawn_rows_of(items: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return the decodes whose logits are sampled: of each item the last token before its drafts, and each draft."""
    ends = []
    for item in items:
        num_before = len(item.token_ids) - 1 - item.num_draft
        ends.append(item._replace(start=item.start + num_before, token_ids=item.token_ids[num_before:]))
    return rows_of(ends)
