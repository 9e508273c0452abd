"""The rows of a step that have a LoRA adapter."""

from __future__ import annotations

from collections.abc import Sequence

from quire.ops.interface.lora import LoraRows
from quire.scheduling.decode_columns import seq_ids_of
from quire.scheduling.plan import ScheduledSequence


class AdapterRows:
    """The adapter of each open sequence, in `by_sequence`."""

    def __init__(self) -> None:
        self.by_sequence: dict[int, int] = {}

    def rows_of_decodes(self, items: Sequence[ScheduledSequence]) -> LoraRows | None:
        """Return the rows with an adapter, for items of one token each; None if no row has one."""
        return LoraRows.of(self._slots(items), [1] * len(items))

    def rows(
        self, items: Sequence[ScheduledSequence], output_counts: Sequence[int] | None
    ) -> tuple[LoraRows, LoraRows | None] | None:
        """Return the rows with an adapter, among all rows and among output rows; None if no row has one."""
        slots = self._slots(items)
        of_all = LoraRows.of(slots, [len(item.token_ids) for item in items])
        if of_all is None:
            return None
        return of_all, None if output_counts is None else LoraRows.of(slots, output_counts)

    def _slots(self, items: Sequence[ScheduledSequence]) -> list[int | None]:
        """Return the adapter slot of each item's sequence, None for no adapter."""
        return [self.by_sequence.get(seq_id) for seq_id in seq_ids_of(items)]
