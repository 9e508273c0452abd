"""Media of a prompt: embeddings that replace the embeddings of placeholder tokens, and their offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_ubyte
from hashlib import blake2b
from itertools import pairwise

import torch
from torch import Tensor

from quire.errors import InvalidParameter
from quire.memory.prefix.prompt_embeddings import MediaSpan
from quire.models.specs.spec import ImageRows
from quire.sequences.media import Media

DIGEST_BYTES = 32
_FIELDS = {"offset", "embeddings"}
_GRID = "grid"
NO_IMAGES = ImageRows()


class EmbeddingsReader:
    """Reads the media of prompts for one model.

    Args:
        width: E of the hidden states.
        dtype: dtype of the hidden states.
        key: secret of at most 64 bytes, constant as long as the cache is kept: clients, who do not know it, cannot
            construct media with the digest of other media.
        image_rows: treatment of the rows of images in the model.
    """

    def __init__(self, width: int, dtype: torch.dtype, key: bytes, image_rows: ImageRows = NO_IMAGES) -> None:
        self._image_rows = image_rows
        self._width = width
        self._dtype = dtype
        self._key = key

    def read(self, value: object, num_tokens: int) -> tuple[Media, ...]:
        """Return a prompt's media in the order of their offsets; the embeddings are copied.

        Args:
            value: a list of mappings with `offset` (index of the first replaced token) and `embeddings`, a tensor
                [tokens, E]. With D deepstack layers it may be [tokens, (1 + D) E]: what is added to the tokens after
                each of the first D layers follows. Models that treat the tokens of an image in another way than others
                take its `grid` too: numbers of rows and columns of tokens.
            num_tokens: number of tokens of the prompt.

        Raises:
            InvalidParameter: another type; embeddings of another width or dtype, empty, or not finite; a grid of
                another number of tokens, or of a model without positions for it; media outside the prompt, or
                overlapping media.
        """
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise InvalidParameter("media", value, "a list of mappings with offset and embeddings")
        read = [self._read_one(f"media[{idx}]", one, num_tokens) for idx, one in enumerate(value)]
        placed = sorted(enumerate(read), key=lambda one: one[1].span.start)
        for (_, before), (idx, after) in pairwise(placed):
            if after.span.start < before.span.end:
                allowed = f"at least {before.span.end}, where the media before it end"
                raise InvalidParameter(f"media[{idx}].offset", after.span.start, allowed)
        return tuple(media for _, media in placed)

    def _read_one(self, field: str, value: object, num_tokens: int) -> Media:
        rows = self._image_rows
        has_grid = rows.sections is not None or rows.see_each_other
        if not isinstance(value, Mapping) or set(value) - ({_GRID} if has_grid else set()) != _FIELDS:
            shown = sorted(map(str, value)) if isinstance(value, Mapping) else value
            fields = "offset, embeddings and perhaps grid" if has_grid else "offset and embeddings"
            raise InvalidParameter(field, shown, f"a mapping with {fields}, and nothing else")
        embeddings = self._checked(f"{field}.embeddings", value["embeddings"])
        offset, count = value["offset"], len(embeddings)
        most = num_tokens - count
        if most < 0:
            raise InvalidParameter(f"{field}.embeddings", f"{count} tokens", f"of at most the prompt's {num_tokens}")
        if type(offset) is not int or not 0 <= offset <= most:
            allowed = f"an integer from 0 to {most}, as the prompt has {num_tokens} tokens and this stands for {count}"
            raise InvalidParameter(f"{field}.offset", offset, allowed)
        grid = self._grid(f"{field}.{_GRID}", value.get(_GRID), count)
        span = MediaSpan(offset, count, self._digest(embeddings, grid))
        return Media(span, embeddings, *rows.of_grid(grid))

    def _grid(self, field: str, value: object, num_tokens: int) -> tuple[int, int] | None:
        """Return numbers of rows and columns."""
        if value is None:
            return None
        if not isinstance(value, Sequence) or len(value) != 2 or not all(type(one) is int for one in value):
            raise InvalidParameter(field, value, "two integers, the numbers of rows and columns of tokens")
        rows, columns = value
        if rows < 1 or rows * columns != num_tokens:
            raise InvalidParameter(field, value, f"rows and columns of the {num_tokens} tokens of its embeddings")
        return rows, columns

    def _checked(self, field: str, value: object) -> Tensor:
        """Return a contiguous copy of embeddings [tokens, E] in host memory."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
            raise InvalidParameter(field, value, "a dense tensor")
        whole = self._width * (1 + self._image_rows.num_deepstack)
        if value.ndim != 2 or value.shape[1] not in (self._width, whole) or not len(value):
            widths = " or ".join(map(str, sorted({self._width, whole})))
            raise InvalidParameter(field, list(value.shape), f"of shape [tokens, {widths}], at least one token")
        if value.dtype is not self._dtype:
            raise InvalidParameter(field, value.dtype, f"of {self._dtype}")
        copy = torch.zeros(len(value), whole, dtype=value.dtype)
        copy[:, : value.shape[1]] = value.detach()
        bad = (~copy.isfinite()).nonzero()
        if len(bad):
            row, column = bad[0].tolist()
            raise InvalidParameter(field, f"{copy[row, column]} in row {row}", "of finite numbers")
        return copy

    def _digest(self, embeddings: Tensor, grid: tuple[int, int] | None) -> bytes:
        # Equal embeddings with another grid give other positions to all that follows.
        shape = "x".join(map(str, (*embeddings.shape, *(grid or ()))))
        return digest_of(embeddings, f"{embeddings.dtype} {shape} ", self._key)


def digest_of(tensor: Tensor, head: str, key: bytes) -> bytes:
    """Return the digest of a contiguous tensor in host memory, after a text that states what its bytes do not."""
    hasher = blake2b(head.encode(), digest_size=DIGEST_BYTES, key=key)
    hasher.update((c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
    return hasher.digest()
