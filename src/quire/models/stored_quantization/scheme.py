"""Interface of the methods of stored quantisation, and shared checks of a layer's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from quire.errors import CheckpointError, UnsupportedModel, shown
from quire.models.families.quantization_config import SERVED
from quire.models.tensors.layer_weight import LayerWeight
from quire.models.tensors.stored_tensor import StoredTensor
from quire.ops.interface.quantized_weight import ScaleDtype

# Names in safetensors of the dtypes of plain weights.
PLAIN: Final = ("BF16", "F16", "F32")
# Dtypes of codes, scales, zero points, shapes and indices, by their names in safetensors.
TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    # An exponent, which is read as a byte.
    "F8_E8M0": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
SCALE_DTYPES: Final[Mapping[str, ScaleDtype]] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
TensorSource = Callable[[str], Tensor]


class StoredQuantization(Protocol):
    """Interface of the methods: the quantisation of each layer, from the configuration and the headers of files."""

    def suffixes(self, layer: str) -> tuple[str, ...] | None:
        """Return the suffixes of a layer's stored tensors after the layer's name; None for a plain `.weight`.

        Raises:
            UnsupportedModel: the layer's scheme is not supported.
            CheckpointError: the configuration contradicts the tensors.
        """

    def weight(self, layer: str, tensor: TensorSource) -> LayerWeight:
        """Return the weight of a quantised layer; codes are unpacked when they are read.

        Args:
            layer: name of the layer.
            tensor: function that returns a stored tensor by its name, in its dtype in `TORCH_DTYPES`.

        Raises:
            UnsupportedModel: the layer's scheme is not supported.
            CheckpointError: a tensor is missing, or of a wrong shape or dtype; the message names it.
        """


class LayerTensors:
    """The stored tensors of one layer, with checks of shapes and dtypes before use."""

    def __init__(self, layer: str, stored: Mapping[str, StoredTensor], tensor: TensorSource) -> None:
        self.layer = layer
        self.num_bytes = 0
        self._stored = stored
        self._tensor = tensor

    def has(self, suffix: str) -> bool:
        """Return whether the layer has a tensor with this suffix."""
        return self.layer + suffix in self._stored

    def header(self, suffix: str, dtypes: tuple[str, ...], num_dims: int | None = None) -> StoredTensor:
        """Return the header of a tensor after a check of dtype and number of dimensions (None for any)."""
        name = self.layer + suffix
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"the checkpoint has no tensor {shown(name)}, of a quantised layer")
        if stored.dtype not in dtypes:
            self.fail(suffix, f"is of dtype {stored.dtype}; {' or '.join(dtypes)} is needed")
        if num_dims is not None and len(stored.shape) != num_dims:
            self.fail(suffix, f"is of shape {list(stored.shape)}; {num_dims} dimensions are needed")
        return stored

    def take(self, suffix: str, dtypes: tuple[str, ...], *shape: int) -> Tensor:
        """Return a tensor after a check of dtype and shape."""
        stored = self.header(suffix, dtypes, len(shape))
        if stored.shape != shape:
            self.fail(suffix, f"is of shape {list(stored.shape)}; {list(shape)} is needed")
        tensor = self._tensor(self.layer + suffix)
        self.num_bytes += tensor.nbytes
        return tensor

    def fail(self, suffix: str, reason: str) -> NoReturn:
        """Raise the error for a tensor."""
        raise CheckpointError(f"tensor {shown(self.layer + suffix)} {reason}")

    def group(self, group_size: int, num_inputs: int, scheme: str) -> Literal[16, 32]:
        """Return the group size of the form, which divides the stored group size and the number of inputs."""
        size = min(group_size, num_inputs)
        if not num_inputs or size % 16 or num_inputs % 16:
            reason = f"it has {num_inputs} inputs in groups of {size}, and both must be multiples of 16"
            refuse(self.layer, scheme, reason)
        return 16 if size % 32 or num_inputs % 32 else 32


def is_plain(layer: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a layer's weight is stored without quantisation, which the configuration may contradict."""
    weight = stored.get(f"{layer}.weight")
    return weight is not None and weight.dtype in PLAIN


def refuse(layer: str, scheme: str, reason: str) -> NoReturn:
    """Raise the error for a layer whose scheme is not supported."""
    raise UnsupportedModel(
        f"layer {shown(layer)} is stored as {scheme}, which is not served: {reason}; served are {SERVED}",
        field="quantization_config",
    )


def contradiction(layer: str, where: str) -> NoReturn:
    """Raise the error for a quantised layer that is plain according to the configuration."""
    raise CheckpointError(
        f"layer {shown(layer)} is stored without a plain weight, but {where} of the quantization_config says that it "
        "is not quantised",
        field="quantization_config",
    )
