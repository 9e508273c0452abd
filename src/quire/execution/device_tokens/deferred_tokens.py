"""Tokens that a step has sampled and the host has not read: the next step reads them on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.execution.step.device_health import step_error
from quire.execution.step.pinned import placed, select_rows
from quire.scheduling.decode_columns import DecodeItems, DecodeResults
from quire.scheduling.plan import ItemResult, ScheduledSequence, StepResult
from quire.sequences.decoding.drafting import UNKNOWN

# Fields of all results, without a Python call for each.
_ERROR: Final = attrgetter("error")
_PROMPT_LOGPROBS: Final = attrgetter("prompt_logprobs")
_DRAFT: Final = attrgetter("draft")


class DeferredTokens:
    """The sampled tokens of the previous step and of the present one.

    Args:
        device: device of the tokens.
        ranks: ranks that all lay out the same items; only rank 0 samples. None for one process.
    """

    def __init__(self, device: torch.device, ranks: RankGroup | None = None) -> None:
        self._device, self._ranks = device, ranks
        # Tokens of a step, int64 [n], with the ids of their sequences.
        self._before: list[tuple[list[int], Tensor]] = []
        self._own: list[tuple[list[int], Tensor]] = []
        self._reads: list[Callable[[], Sequence[ItemResult]]] = []
        # The previous step's sequences and tokens, int64 [n], concatenated at their first use.
        self._drawn: tuple[list[int], Tensor] | None = None

    def begin_step(self) -> None:
        """Begin a step: its placeholders stand for the tokens that the previous step has sampled."""
        self._before, self._own, self._reads, self._drawn = self._own, [], [], None

    def add(self, seq_ids: list[int], token_ids: Tensor, read: Callable[[], Sequence[ItemResult]]) -> None:
        """Keep tokens of the present step.

        Args:
            seq_ids: sequences that they were sampled for.
            token_ids: int64 [n] on the device; nothing may write to it afterwards.
            read: returns the results of the items; it waits for the device.
        """
        self._own.append((seq_ids, token_ids))
        self._reads.append(read)

    def add_read(self, read: Callable[[], Sequence[ItemResult]]) -> None:
        """Keep a reader of results of the present step; the next step has no placeholders for its tokens. See `add`."""
        self._reads.append(read)

    def reader_of(self, launched: StepResult) -> Callable[[], StepResult]:
        """Return a function that waits for the tokens of the present step, and returns its result.

        Args:
            launched: result, with empty items for tokens to be read. Sequences that it failed to sample get a
                dummy token for the next step: their requests end.
        """
        if any(map(_ERROR, launched.items)):
            seq_ids = [item.seq_id for item in launched.items if item.error is not None]
            self._own.append((seq_ids, torch.zeros(len(seq_ids), dtype=torch.int64, device=self._device)))
        return partial(_read, launched, self.take_reads())

    def take_reads(self) -> list[Callable[[], Sequence[ItemResult]]]:
        """Return the readers of the present step's results, and forget them."""
        reads, self._reads = self._reads, []
        return reads

    def fill(self, input_ids: Tensor, items: Sequence[ScheduledSequence], rows: Sequence[int]) -> None:
        """See `TokenSource`; other ranks get the tokens from rank 0 by `RankGroup.of_first`."""
        ranks = self._ranks
        if ranks is None or ranks.rank == 0:
            self.put(input_ids, items, rows)
        if ranks is None:
            return
        if isinstance(items, DecodeItems) or any(item.token_ids[0] == UNKNOWN for item in items):
            own = input_ids[: rows[len(items) - 1] + len(items[-1].token_ids)]
            own.copy_(ranks.of_first(own))

    def put(self, input_ids: Tensor, items: Sequence[ScheduledSequence], rows: Sequence[int]) -> None:
        """Replace placeholders on the rank that samples; see `TokenSource.fill`."""
        if isinstance(items, DecodeItems):
            wanted = items.seq_ids
        else:
            wanted = [item.seq_id for item in items if item.token_ids[0] == UNKNOWN]
        if not wanted:
            return
        if self._drawn is None:
            if len(self._before) == 1:
                self._drawn = self._before[0]
            else:
                known, parts = zip(*self._before, strict=True)
                self._drawn = list(chain.from_iterable(known)), torch.cat(parts)
        seq_ids, drawn = self._drawn
        last = len(wanted) - 1
        # Usually the placeholders are the first rows, which is so if the last placeholder is at index `last`.
        are_first = isinstance(items, DecodeItems) or (items[last].seq_id == wanted[last] and rows[last] == last)
        if are_first and wanted == seq_ids:
            input_ids[: len(wanted)].copy_(drawn)
            return
        place_of = {seq_id: place for place, seq_id in enumerate(seq_ids)}
        sources = [place_of[seq_id] for seq_id in wanted]
        if are_first:
            input_ids[: len(wanted)].copy_(select_rows(drawn, sources))
            return
        targets = [row for row, item in zip(rows, items, strict=False) if item.token_ids[0] == UNKNOWN]
        numbers = placed(torch.tensor((targets, sources), dtype=torch.int64), self._device)
        input_ids.index_copy_(0, numbers[0], drawn.index_select(0, numbers[1]))


def _read(launched: StepResult, reads: Sequence[Callable[[], Sequence[ItemResult]]]) -> StepResult:
    """Wait for the tokens of a step, and return its result."""
    try:
        parts = [read() for read in reads]
    except Exception as error:
        raise step_error(f"step {launched.tick} failed in the data plane", error) from error
    if not parts:
        return launched
    is_whole = len(parts) == 1 and len(parts[0]) == len(launched.items)
    if is_whole and isinstance(parts[0], DecodeResults):
        return launched._replace(items=parts[0])
    if is_whole and not any(any(map(field, launched.items)) for field in (_ERROR, _PROMPT_LOGPROBS, _DRAFT)):
        return launched._replace(items=tuple(parts[0]))
    read = {result.seq_id: result for part in parts for result in part}
    return launched._replace(items=tuple([_complete(item, read) for item in launched.items]))


def _complete(item: ItemResult, read: dict[int, ItemResult]) -> ItemResult:
    """Return the result of an item, completed by the result that was read."""
    found = read.get(item.seq_id)
    if found is None or item.error is not None:
        return item
    if found.error is not None or not (item.prompt_logprobs or item.draft):
        return found
    return found._replace(prompt_logprobs=item.prompt_logprobs, draft=item.draft)
