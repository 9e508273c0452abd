"""Names and sizes of the dtypes of cached keys and values, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class CacheDtype(NamedTuple):
    """Size of a cached value.

    Args:
        element_bytes: bytes of one value.
        scale_bytes: bytes of the scale that each head stores with a token's keys, and again with its values.
    """

    element_bytes: int
    scale_bytes: int = 0


# int8 has a float32 scale for each token and head, since integers have no exponent. fp8 has no scales in its blocks:
# its exponent covers the range, and the scale of a layer belongs to the weights.
CACHE_DTYPES: Final[Mapping[str, CacheDtype]] = {
    "bfloat16": CacheDtype(2),
    "float16": CacheDtype(2),
    "float32": CacheDtype(4),
    "fp8": CacheDtype(1),
    "int8": CacheDtype(1, 4),
}
