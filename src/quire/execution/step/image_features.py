"""Features of images: those in memory, those on disk, and one image on its way through the encoder.

```
 in memory?  ->  on disk?  ->  start, layer, layer, ... layer  ->  in memory, and written to disk
                               between the steps of the decoder
```

An image's digest covers its patches, and all else that its features follow from; it is keyed with the secret of the
prefix cache. On disk the features are records of the prefix cache's store, with its checksums, limit and order of
deletion, under the identity of the model.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Final, NamedTuple

import torch
from torch import Tensor

from quire.distributed.kvstore.prefix_store import BATCH_SHARE, PrefixStore
from quire.distributed.kvstore.record import bytes_of
from quire.memory.results import StoredBlock
from quire.models.modules.vision_encoder import ImagePass, ImagePatches, VisionEncoder
from quire.scheduling.stats import Metric

# Features of images that are kept in memory: some 100 images of 256 tokens and 2048 bfloat16 values.
MAX_FEATURE_BYTES: Final = 128 << 20
# In place of a cache group, of which no model has as many.
_GROUP: Final = 0xFFFF
_PARENT: Final = bytes(16)


class ImageStats(NamedTuple):
    """Counters of the images of prompts since the engine's start, and the number of images that wait."""

    num_encoded: Annotated[int, Metric("Images that went through the encoder.", "images_encoded")]
    encoder_s: Annotated[
        float, Metric("Time of the encoder of images, and of loads from disk in its place.", "image_encoder_seconds")
    ]
    num_hits: Annotated[int, Metric("Images whose features were in memory.", "image_features_hits")]
    num_disk_hits: Annotated[int, Metric("Images whose features were loaded from disk.", "image_features_disk_hits")]
    num_waiting: Annotated[int, Metric("Images that prompts wait for.", "images_waiting", "gauge")]


class ImageFeatures:
    """The features of a model's images, [tokens, (1 + D) E] each; the least recently used ones leave the memory.

    Args:
        encoder: encoder of images; None where another process encodes them, and features are only repeated.
        store: prefix cache on disk; None without one.
        max_bytes: bytes that are kept in memory, of one image at least.

    Attributes:
        max_bytes: the argument.
        num_encoded: images that went through the encoder.
        num_loaded: images whose features were loaded from disk.
        num_hits: images that a prompt began to read, and whose features another one had brought to memory.
    """

    def __init__(
        self, encoder: VisionEncoder | None, store: PrefixStore | None = None, max_bytes: int = MAX_FEATURE_BYTES
    ) -> None:
        self.max_bytes = max_bytes
        self.num_encoded = self.num_loaded = self.num_hits = 0
        self._encoder, self._store = encoder, store
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()
        # Digests in memory that no prompt has read yet.
        self._unread: set[bytes] = set()
        self._digest: bytes | None = None
        self._pass: ImagePass | None = None

    def holds(self, image: ImagePatches) -> bool:
        """Return whether an image's features are in memory; they are the last ones to leave it then."""
        if image.digest not in self._features:
            return False
        self._features.move_to_end(image.digest)
        return True

    def of(self, digest: bytes) -> Tensor:
        """Return the features of an image that the memory holds."""
        return self._features[digest]

    def read(self, image: ImagePatches, *, begins: bool) -> Tensor:
        """Return the features of an image, which are in memory.

        Args:
            image: an image that the memory holds.
            begins: True for the first rows of the image that a prompt reads.
        """
        if begins and image.digest in self._unread:
            self._unread.discard(image.digest)
        elif begins:
            self.num_hits += 1
        return self._features[image.digest]

    def next_kind(self, image: ImagePatches) -> str:
        """Return the kind of work that `advance` would do; see `ImagePass.kind`."""
        return "start" if self._pass is None or self._digest != image.digest else self._pass.kind

    @torch.inference_mode()
    def advance(self, image: ImagePatches) -> bool:
        """Load an image's features from disk, or take it through a layer or a piece of one; return True at the end.

        An image that is begun takes the place of one on its way. After an error, an image begins anew.
        """
        encoder = self._encoder
        assert encoder is not None, "another process encodes images"
        if self._digest != image.digest:
            features = self._load(image, encoder)
            if features is not None:
                self.num_loaded += 1
                self.keep(image.digest, features)
                return True
        try:
            if self._pass is None or self._digest != image.digest:
                self._digest, self._pass = image.digest, encoder.start(image.values, image.rows, image.columns)
            encoded = encoder.advance(self._pass)
            if encoder.device.type == "cuda":  # its time is measured
                torch.cuda.synchronize(encoder.device)
        except BaseException:
            self.drop_pass()
            raise
        if encoded is None:
            return False
        self.drop_pass()
        self.num_encoded += 1
        features = encoded.transpose(0, 1).flatten(1).contiguous()
        self.keep(image.digest, features)
        # The store's file may have no free pages for a larger record.
        if self._store is not None and features.nbytes <= self._store.capacity * BATCH_SHARE:
            on_host = features.cpu()
            self._store.save(_record(image), bytes_of(on_host))
        return True

    def drop_pass(self) -> None:
        """Forget the image on its way through the layers."""
        self._digest = self._pass = None

    def close(self) -> None:
        """Drop the features."""
        self.drop_pass()
        self._features.clear()
        self._store = None

    def _load(self, image: ImagePatches, encoder: VisionEncoder) -> Tensor | None:
        """Return the features on disk; None without sound ones."""
        if self._store is None or not self._store.holds(_record(image)):
            return None
        spec = encoder.spec
        shape = image.rows * image.columns // spec.merge_size**2, spec.num_features * spec.out_width
        features = torch.empty(shape, dtype=encoder.dtype)
        if not self._store.fetch(_record(image), bytes_of(features)):
            return None
        return features.to(encoder.device)

    def keep(self, digest: bytes, features: Tensor) -> None:
        """Keep the features of an image; the least recently used ones leave if there are too many."""
        self._features[digest] = features
        self._unread.add(digest)
        num_bytes = sum(each.nbytes for each in self._features.values())
        while num_bytes > self.max_bytes and len(self._features) > 1:
            oldest_digest, oldest = self._features.popitem(last=False)
            self._unread.discard(oldest_digest)
            num_bytes -= oldest.nbytes


def _record(image: ImagePatches) -> StoredBlock:
    return StoredBlock(_GROUP, image.digest, b"", _PARENT)
