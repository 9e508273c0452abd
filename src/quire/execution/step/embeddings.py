"""Multimodal embeddings of open sequences, which replace the embeddings of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from quire.execution.step.image_features import ImageFeatures
from quire.models.modules.vision_encoder import ImagePatches
from quire.scheduling.plan import ScheduledSequence
from quire.sequences.media import Media


class MultimodalEmbeddings:
    """The media of each open sequence, in `by_sequence`.

    Args:
        device: device of the decoder.
        images: features of images, which are in memory before a step computes rows of them; None for a model without
            an encoder.
    """

    def __init__(self, device: torch.device, images: ImageFeatures | None = None) -> None:
        self._device, self._images = device, images
        self.by_sequence: dict[int, tuple[Media, ...]] = {}

    def rows(self, items: Sequence[ScheduledSequence], row_starts: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Return the rows of a step with multimodal embeddings, int64 [M], and these [M, (1 + D) E], or None."""
        rows: list[Tensor] = []
        parts: list[Tensor] = []
        for item, row_start in zip(items, row_starts, strict=False):
            end = item.start + len(item.token_ids)
            for span, embeddings, *_ in self.by_sequence.get(item.seq_id, ()):
                first, last = max(span.start, item.start), min(span.end, end)
                if first < last:
                    rows.append(torch.arange(first, last) + (row_start - item.start))
                    begins = first == span.start or item.new_sequence is not None
                    part = self._of(embeddings, begins=begins)[first - span.start : last - span.start]
                    parts.append(part.to(self._device))
        if not rows:
            return None
        return torch.cat(rows).to(self._device), torch.cat(parts)

    def _of(self, embeddings: object, *, begins: bool) -> Tensor:
        """Return the embeddings of a medium, [tokens, (1 + D) E]; see `ImageFeatures.read` for those of an image."""
        if not isinstance(embeddings, ImagePatches):
            return cast(Tensor, embeddings)
        assert self._images is not None, "an image without an encoder"
        return self._images.read(embeddings, begins=begins)
