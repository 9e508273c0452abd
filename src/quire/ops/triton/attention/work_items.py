"""Attention of a step, cut into work items for programs: on the host, once a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, pairwise
from typing import NamedTuple

from torch import Tensor

from quire.ops.interface.ops import AttentionBatch
from quire.ops.triton.attention.shared_prefixes import PrefixCandidate, SharingRule, find_shared
from quire.ops.triton.attention.shared_work import NOTHING_SHARED, SharedWork, Sharing
from quire.ops.triton.attention.splits import split_length
from quire.ops.triton.tiles import Tile


class WorkItem(NamedTuple):
    """Some rows of one sequence, and a range of the tokens that they see.

    Args:
        first_row: index of the first row in the step.
        num_rows: number of rows.
        position: position of the first row in its sequence.
        table: index of the sequence's first block in `block_ids`.
        first: first token that is read.
        end: end of the tokens that are read.
        place: index of the first row's partial result, which the other rows' results follow; -1 if not split.
    """

    first_row: int
    num_rows: int
    position: int
    table: int
    first: int
    end: int
    place: int = -1


class SplitRows(NamedTuple):
    """Rows whose tokens are in several splits, either their own or shared with other sequences.

    Args:
        first_row: index of the first row in the step.
        num_rows: number of rows.
        place: index of the first partial result.
        num_parts: number of splits, each with a partial result of each row.
    """

    first_row: int
    num_rows: int
    place: int
    num_parts: int


class Work(NamedTuple):
    """The items of a step.

    Args:
        few: items of sequences whose rows fit into one decode tile and whose tokens are not split.
        parts: items of such sequences whose tokens are split, or partly shared.
        many: items of other sequences (prefill tiles), by decreasing number of tokens.
        split_rows: rows of `parts`.
        num_places: number of partial results.
        shared: items of tokens that sequences of `parts` share.
    """

    few: list[WorkItem]
    parts: list[WorkItem]
    many: list[WorkItem]
    split_rows: list[SplitRows]
    num_places: int
    shared: SharedWork


def plan_work(
    batch: AttentionBatch,
    group: int,
    decode: Tile,
    prefill: Tile,
    num_kv_heads: int,
    num_processors: int,
    rule: SharingRule | None = None,
) -> Work:
    """Cut a step into items."""
    spans = list(_sequences(batch))
    few = [span for span in spans if span.num_rows * group <= decode.rows]
    sharing = NOTHING_SHARED
    if rule is not None and len(few) > 1:
        shared = find_shared(list(_candidates(batch, few)), host_block_ids(batch), rule)
        sharing = Sharing.of(shared.ranges, rule, num_kv_heads, num_processors)
        few = [span._replace(first=sharing.ends.get(span.first_row, span.first)) for span in few]
    num_tokens = sum(span.end - span.first for span in few)
    length = split_length(num_tokens, num_kv_heads, num_processors, decode.tokens, len(few))
    whole: list[WorkItem] = []
    parts: list[WorkItem] = []
    split_rows: list[SplitRows] = []
    num_places = 0
    for span in few:
        start, num_shared = span.first // decode.tokens * decode.tokens, sharing.num_parts.get(span.first_row, 0)
        if span.end - start <= length and not num_shared:
            whole.append(span)
            continue
        starts = range(start, span.end, length)
        parts.extend(
            span._replace(
                first=max(part_start, span.first), end=min(part_start + length, span.end), place=num_places + before
            )
            for before, part_start in zip(count(num_shared * span.num_rows, span.num_rows), starts, strict=False)
        )
        split_rows.append(SplitRows(span.first_row, span.num_rows, num_places, num_shared + len(starts)))
        num_places += split_rows[-1].num_parts * span.num_rows
    many: list[WorkItem] = []
    for span in spans:
        if span.num_rows * group > decode.rows:
            many.extend(_tiles(batch, span, prefill.rows // group))
    many.sort(key=lambda item: item.first - item.end)
    places = {rows.first_row: rows.place for rows in split_rows}
    return Work(whole, parts, many, split_rows, num_places, sharing.work(places))


def _candidates(batch: AttentionBatch, spans: Iterable[WorkItem]) -> Iterator[PrefixCandidate]:
    """Yield the sequences whose rows all see their first token; others (with windows or chunks) share nothing."""
    for span in spans:
        if batch.first_seen(span.end - 1) == 0:
            yield PrefixCandidate(span.first_row, span.num_rows, span.table, span.position)


def host_block_ids(batch: AttentionBatch) -> Tensor:
    """Return the block tables of a step, int64 on the host."""
    ids = batch.block_ids if batch.host_block_ids is None else batch.host_block_ids
    assert not ids.is_cuda, "the host plans with block tables of its own"
    return ids


def _sequences(batch: AttentionBatch) -> Iterator[WorkItem]:
    """Yield each sequence with rows as one item."""
    spans = zip(pairwise(batch.row_starts), batch.context_lens, batch.block_starts, strict=False)
    for (start, stop), context_len, table in spans:
        position = context_len - (stop - start)
        yield WorkItem(start, stop - start, position, table, batch.first_seen(position), context_len)


def _tiles(batch: AttentionBatch, span: WorkItem, step: int) -> Iterator[WorkItem]:
    """Yield the rows of a sequence in items of `step` rows."""
    for skipped in range(0, span.num_rows, step):
        position, num_rows = span.position + skipped, min(step, span.num_rows - skipped)
        yield span._replace(
            first_row=span.first_row + skipped,
            num_rows=num_rows,
            position=position,
            first=batch.first_seen(position),
            end=position + num_rows,
        )
