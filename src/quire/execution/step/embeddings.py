"""Multimodal embeddings of open sequences, which replace the embeddings of their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, cast

import torch
from torch import Tensor

from quire.models.modules.vision_encoder import ImagePatches, VisionEncoder
from quire.scheduling.plan import ScheduledSequence
from quire.sequences.media import Media

# Features of images that are kept for other sequences: some 100 images of 256 tokens and 2048 bfloat16 values.
MAX_FEATURE_BYTES: Final = 128 << 20


class MultimodalEmbeddings:
    """The media of each open sequence, in `by_sequence`.

    An image is encoded when a step first computes a row of it: a prefix that is hit encodes nothing.

    Args:
        device: device of the decoder.
        encoder: encoder of images; None for a model without one.

    Attributes:
        num_encoded: images that were encoded.
    """

    def __init__(self, device: torch.device, encoder: VisionEncoder | None = None) -> None:
        self._device, self._encoder = device, encoder
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_encoded = 0
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
                    parts.append(self._of(embeddings)[first - span.start : last - span.start].to(self._device))
        if not rows:
            return None
        return torch.cat(rows).to(self._device), torch.cat(parts)

    def _of(self, embeddings: object) -> Tensor:
        """Return the embeddings of a medium, [tokens, (1 + D) E], which are computed for an image if nobody has."""
        if not isinstance(embeddings, ImagePatches):
            return cast(Tensor, embeddings)
        features = self._features.pop(embeddings.digest, None)
        if features is None:
            assert self._encoder is not None, "an image without an encoder"
            self.num_encoded += 1
            features = self._encoder(embeddings.values, embeddings.rows, embeddings.columns)
            features = features.transpose(0, 1).flatten(1)
        self._features[embeddings.digest] = features  # as the last one used
        num_bytes = sum(each.nbytes for each in self._features.values())
        while num_bytes > MAX_FEATURE_BYTES and len(self._features) > 1:
            num_bytes -= self._features.popitem(last=False)[1].nbytes
        return features
