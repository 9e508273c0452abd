"""Multimodal embeddings of open sequences, which replace the embeddings of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from quire.scheduling.plan import ScheduledSequence
from quire.sequences.media import Media


class MultimodalEmbeddings:
    """The media of each open sequence, in `by_sequence`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.by_sequence: dict[int, tuple[Media, ...]] = {}

    def rows(self, items: Sequence[ScheduledSequence], row_starts: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Return the rows of a step with multimodal embeddings, int64 [M], and these [M, (1 + D) E], or None."""
        rows: list[Tensor] = []
        parts: list[Tensor] = []
        for item, row_start in zip(items, row_starts, strict=False):
            end = item.start + len(item.token_ids)
            for span, embeddings, _ in self.by_sequence.get(item.seq_id, ()):
                first, last = max(span.start, item.start), min(span.end, end)
                if first < last:
                    rows.append(torch.arange(first, last) + (row_start - item.start))
                    parts.append(cast(Tensor, embeddings)[first - span.start : last - span.start])
        if not rows:
            return None
        return torch.cat(rows).to(self._device), torch.cat(parts).to(self._device)
