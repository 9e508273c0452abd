"""The work of attention in a step, cut into items for programs: on the host, once a step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from quire.ops.interface import AttentionBatch
from quire.ops.triton.tiles import Tile

# Tokens of the shortest split: a shorter one costs more in partial results than it brings in parallel work.
MIN_SPLIT: Final = 256
# Programs that are wanted for each processor of the GPU.
PROGRAMS_PER_PROCESSOR: Final = 2


class WorkItem(NamedTuple):
    """Some rows of one sequence, and some of the tokens that they see.

    Args:
        first_row: index of the first row in the step.
        num_rows: number of rows.
        position: position of the first row in its sequence.
        table: index of the sequence's first block in `block_ids`.
        first: first token that is read.
        end: end of the tokens that are read.
        place: index of the partial result; -1 for a whole one.
    """

    first_row: int
    num_rows: int
    position: int
    table: int
    first: int
    end: int
    place: int = -1


class SplitRows(NamedTuple):
    """Rows whose tokens are in several items.

    Args:
        first_row: index of the first row in the step.
        num_rows: number of rows.
        place: index of the first partial result.
        num_parts: number of partial results.
    """

    first_row: int
    num_rows: int
    place: int
    num_parts: int


class Work(NamedTuple):
    """The items of a step.

    Args:
        few: items of sequences with so few rows that one decode tile holds them, read in one piece.
        parts: items of such sequences whose tokens are split.
        many: items of other sequences, those with the most tokens first.
        split_rows: rows of `parts`.
    """

    few: list[WorkItem]
    parts: list[WorkItem]
    many: list[WorkItem]
    split_rows: list[SplitRows]


def plan_work(
    batch: AttentionBatch, group: int, decode: Tile, prefill: Tile, num_kv_heads: int, num_processors: int
) -> Work:
    """Cut a step into items.

    Args:
        batch: rows and contexts of the step.
        group: number of query heads of a KV head.
        decode, prefill: tiles of the two kinds of sequences.
        num_kv_heads: K; each head has programs of its own.
        num_processors: number of processors of the GPU.
    """
    work = Work([], [], [], [])
    spans = list(_sequences(batch))
    few = [span for span in spans if span.num_rows * group <= decode.rows]
    length = split_length(sum(each.end - each.first for each in few), num_kv_heads, num_processors, decode.tokens)
    for span in few:
        start = span.first // decode.tokens * decode.tokens
        if span.end - start <= length:
            work.few.append(span)
            continue
        starts = range(start, span.end, length)
        place = len(work.parts)
        work.parts.extend(
            span._replace(first=max(each, span.first), end=min(each + length, span.end), place=place + idx)
            for idx, each in enumerate(starts)
        )
        work.split_rows.append(SplitRows(span.first_row, span.num_rows, place, len(starts)))
    step = prefill.rows // group
    for span in spans:
        if span.num_rows * group > decode.rows:
            work.many.extend(_tiles(batch, span, step))
    work.many.sort(key=lambda item: item.first - item.end)
    return work


def split_length(num_tokens: int, num_kv_heads: int, num_processors: int, tile_tokens: int) -> int:
    """Return the number of tokens of a split, a multiple of a tile's, for work on all processors."""
    share = -(-num_tokens * num_kv_heads // (PROGRAMS_PER_PROCESSOR * num_processors))
    return max(MIN_SPLIT, -(-share // tile_tokens) * tile_tokens)


def _sequences(batch: AttentionBatch) -> Iterator[WorkItem]:
    """Yield each sequence with rows as one item."""
    spans = zip(pairwise(batch.row_starts), batch.context_lens, batch.block_starts, strict=False)
    for (start, stop), context_len, table in spans:
        position = context_len - (stop - start)
        yield WorkItem(start, stop - start, position, table, batch.first_seen(position), context_len)


def _tiles(batch: AttentionBatch, span: WorkItem, step: int) -> Iterator[WorkItem]:
    """Yield the rows of a sequence, `step` of them at a time."""
    for skipped in range(0, span.num_rows, step):
        position, num_rows = span.position + skipped, min(step, span.num_rows - skipped)
        yield span._replace(
            first_row=span.first_row + skipped,
            num_rows=num_rows,
            position=position,
            first=batch.first_seen(position),
            end=position + num_rows,
        )
