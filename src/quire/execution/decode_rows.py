"""Items with several tokens as decodes of one token each, for steps that are captured row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.scheduling.plan import ScheduledSequence

# Tokens of a sequence that are computed as decodes: the most drafts, and tokens that go before them.
MOST_ROWS: Final = 64


def rows_of(items: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return a decode of one token for each token of items, whose block tables have changed already.

    It sees the tokens before it that are in the same step, as all their keys and values are stored before attention
    reads any.
    """
    return [
        ScheduledSequence(item.seq_id, item.start + idx, (token_id,), (), item.num_samples, None)
        for item in items
        for idx, token_id in enumerate(item.token_ids)
    ]


def few_rows_of(items: Sequence[ScheduledSequence]) -> tuple[Sequence[ScheduledSequence], list[int] | None] | None:
    """Return items of one token each, and how many of them are of one sequence, one after the other.

    Returns:
        None in place of the numbers where each is of another sequence; None where a sequence has too many tokens.
    """
    counts = [len(item.token_ids) for item in items]
    most = max(counts)
    if most == 1:
        return items, None
    return (rows_of(items), counts) if most <= MOST_ROWS else None


def drawn_rows_of(items: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return a decode for the token in front of the drafts of each item, and for each draft: a token is drawn there."""
    ends = []
    for item in items:
        num_before = len(item.token_ids) - 1 - item.num_draft
        ends.append(item._replace(start=item.start + num_before, token_ids=item.token_ids[num_before:]))
    return rows_of(ends)
