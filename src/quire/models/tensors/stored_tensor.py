"""The place of a tensor in a checkpoint's file, and the function that decodes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # planning reads configurations without torch
    from torch import Tensor

    from quire.ops.interface.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place in a file, and its description in the file's header.

    Args:
        path: file of the tensor.
        dtype: name of its dtype: "BF16", "F16", "F32", ..., or of a quantised type ("Q4_K").
        shape: shape in the model's family.
        offset: offset of its first byte in the file.
        num_bytes: number of its bytes.
        decode: function from its bytes, uint8 [num_bytes], to its values; None if they are stored plain, in order.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    decode: Callable[[Tensor], Tensor | QuantizedWeight] | None = None
