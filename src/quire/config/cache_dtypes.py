"""The dtypes of keys and values in the cache: their names and their sizes, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class CacheDtype(NamedTuple):
    """The size of a cached value.

    Args:
        element_bytes: bytes of one value.
        scale_bytes: bytes of the scale that each head stores with a token's keys, and again with its values.
    """

    element_bytes: int
    scale_bytes: int = 0


# int8 has a float32 scale for each token and head: eight bits without an exponent need one that follows the values.
# fp8 has none in its blocks: its exponent covers the range, and a scale of a whole layer belongs to the weights.
CACHE_DTYPES: Final[Mapping[str, CacheDtype]] = {
    "bfloat16": CacheDtype(2),
    "float16": CacheDtype(2),
    "float32": CacheDtype(4),
    "fp8": CacheDtype(1),
    "int8": CacheDtype(1, 4),
}
