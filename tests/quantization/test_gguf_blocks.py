"""Blocks of GGUF tensors: read back by the `gguf` package and by Quire, and rounded no worse than need be."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from quire.cli.quantization.gguf_blocks import PACKERS, pack_rows
from quire.models.gguf.block_types import BLOCK_TYPES
from quire.models.gguf.tensor_types import TENSOR_TYPES, TensorType
from quire.ops.interface.quantized_weight import dequantize

SMALL = [kind for kind in PACKERS if kind.block_values == 32]
LARGE = [kind for kind in PACKERS if kind.block_values == 256]


def values() -> Tensor:
    tensor = torch.randn(9, 768, generator=torch.Generator().manual_seed(3)) * 0.02
    tensor[1] = 0
    tensor[2, :32] = 0
    tensor[3] = tensor[3].abs() + 1
    tensor[4] = -tensor[4].abs() - 1
    tensor[5, 5] = 40.0
    tensor[6] = 0.5
    return tensor


def read_back(kind: TensorType, packed: Tensor) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(packed.numpy(), Type(kind.id)))


@pytest.mark.parametrize("kind", PACKERS, ids=lambda kind: kind.name)
def test_the_package_and_quire_read_the_same(kind: TensorType) -> None:
    packed = pack_rows(kind, values())
    block = BLOCK_TYPES[kind.id]
    torch.testing.assert_close(dequantize(block.form, block.unpack(packed)), read_back(kind, packed), rtol=0, atol=0)


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_small_blocks_have_the_bytes_of_the_package(kind: TensorType) -> None:
    with np.errstate(invalid="ignore"):
        expected = gguf.quants.quantize(values().numpy(), Type(kind.id))
    assert np.array_equal(pack_rows(kind, values()).numpy(), expected)


@pytest.mark.parametrize("kind", LARGE, ids=lambda kind: kind.name)
def test_large_blocks_are_nearer_than_a_plain_range(kind: TensorType) -> None:
    tensor = values()
    error = (read_back(kind, pack_rows(kind, tensor)) - tensor).square().sum(1)
    # Each group over its own range, with a scale and a minimum in float32.
    size, levels = (16, 63) if kind.name == "Q6_K" else (32, 15 if kind.name == "Q4_K" else 31)
    groups = tensor.view(len(tensor), -1, size)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if kind.name == "Q6_K":
        low, high, levels = torch.zeros_like(low), groups.abs().amax(-1, keepdim=True), 31
    steps = (high - low).clamp(min=1e-9) / levels
    plain = (((groups - low) / steps).round() * steps + low).view_as(tensor)
    normal = torch.tensor([0, 7, 8])
    assert (error[normal] < (plain - tensor).square().sum(1)[normal]).all()
    # Rows far from zero, with one large value, of zeros: within the steps of 6 bits of a scale.
    assert (error <= 1e-3 * tensor.square().sum(1) + 1e-12)[[1, 3, 4, 6]].all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types(name: str) -> None:
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    expected = gguf.quants.quantize(values().numpy(), Type[name]).view(np.uint8)
    assert np.array_equal(pack_rows(kind, values()).numpy(), expected)
