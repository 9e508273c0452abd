"""Layers of random codes, packed value by value as the formats define it, and their values in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.models.stored_quantization import TORCH_DTYPES, read_quantization
from quire.models.tensors.layer_weight import LayerWeight
from quire.models.tensors.stored_tensor import StoredTensor

NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class Files:
    """The tensors of a checkpoint, and the names of those that were read."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)

    def add(self, layer: str, tensors: dict[str, Tensor]) -> Files:
        self.tensors |= {layer + suffix: tensor for suffix, tensor in tensors.items()}
        return self

    def headers(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(Path("model.safetensors"), NAMES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
            for name, tensor in self.tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        self.read.append(name)
        return self.tensors[name]

    def weight(self, quantization: dict[str, Any], layer: str = "a") -> LayerWeight:
        """Read a layer; exactly the tensors of its suffixes are looked at."""
        found = read_quantization({"quantization_config": quantization}, self.headers())
        assert found is not None
        suffixes = found.suffixes(layer)
        assert suffixes is not None
        self.read.clear()
        weight = found.weight(layer, self.tensor)
        assert sorted(self.read) == sorted(layer + suffix for suffix in suffixes)
        for name in self.read:
            assert TORCH_DTYPES[NAMES[self.tensors[name].dtype]] == self.tensors[name].dtype
        assert weight.weight.num_bytes == sum(self.tensors[name].nbytes for name in self.read)
        return weight


def random_codes(num_rows: int, width: int, bits: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, (num_rows, width))


def random_scales(num_rows: int, num_groups: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(num_rows, num_groups, generator=torch.Generator().manual_seed(1)) + 0.1).to(dtype)


def pack(values: Sequence[int], bits: int) -> list[int]:
    """Pack values into words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    words = [0] * -(-len(values) // per_word)
    for idx, value in enumerate(values):
        words[idx // per_word] |= int(value) << bits * (idx % per_word)
    return words


def words_of(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32).copy())


def pack_rows(codes: np.ndarray, bits: int) -> Tensor:
    """Pack along the second dimension."""
    return words_of([pack(row, bits) for row in codes])


def pack_columns(codes: np.ndarray, bits: int) -> Tensor:
    """Pack along the first dimension."""
    return pack_rows(codes.T, bits).t().contiguous()


def pack_awq(codes: np.ndarray) -> Tensor:
    """Pack the transpose [K, N] along N, interleaved."""
    rows = []
    for row in codes.T:
        ordered = [row[8 * (idx // 8) + AWQ_ORDER[idx % 8]] for idx in range(len(row))]
        rows.append(pack(ordered, 4))
    return words_of(rows)


def pack_fp4(codes: np.ndarray) -> Tensor:
    """Pack pairs into bytes, the even one in the lower half."""
    return torch.tensor([[int(a) | int(b) << 4 for a, b in zip(row[::2], row[1::2], strict=True)] for row in codes]).to(
        torch.uint8
    )


def fp4_values(codes: np.ndarray, exponents: np.ndarray) -> Tensor:
    """Return the values of codes [N, K] with exponents [N, K / 32]."""
    values = np.zeros(codes.shape, np.float32)
    for row, col in np.ndindex(*codes.shape):
        level = FP4[codes[row, col] & 7] * (-1 if codes[row, col] & 8 else 1)
        values[row, col] = level * 2.0 ** (int(exponents[row, col // 32]) - 127)
    return torch.from_numpy(values)


def values(codes: np.ndarray, zeros: np.ndarray | int, scales: Tensor, groups: Sequence[int]) -> Tensor:
    """Return (q - z) * s in float32, for codes [N, K], zeros and scales [N, groups] and the group of each input."""
    levels = np.zeros(codes.shape, np.float32)
    factors = scales.float().numpy()
    for row, col in np.ndindex(*codes.shape):
        zero = zeros if isinstance(zeros, int) else zeros[row, groups[col]]
        levels[row, col] = np.float32(int(codes[row, col]) - int(zero)) * factors[row, groups[col]]
    return torch.from_numpy(levels)


def check_values(found: LayerWeight, wanted: Tensor) -> None:
    """Compare all rows, rows of a slice, and rows in another order, in the order of the layer's inputs."""
    if found.input_order is not None:
        assert sorted(found.input_order.tolist()) == list(range(wanted.shape[1]))
        wanted = wanted[:, found.input_order]
    assert found.weight.shape == tuple(wanted.shape)
    picked = torch.tensor([wanted.shape[0] - 1, 0, 3])
    for rows in (slice(None), slice(1, None, 3), slice(2, 5), picked):
        assert torch.equal(found.weight.dequantize(rows), wanted[rows])
    part = found.weight.rows(slice(3, 9)).rows(torch.tensor([4, 1]))
    assert torch.equal(part.dequantize(), wanted[[7, 4]])
    rows_read = found.weight.read(slice(0, 2))
    form = found.weight.form
    assert rows_read.codes.dtype == torch.uint8
    assert int(rows_read.codes.max()) < 1 << form.bits
    assert str(rows_read.scales.dtype) == f"torch.{form.scale}"
    assert (rows_read.zero_points is not None) == form.has_zero_points
    for tensor in rows_read:
        assert tensor is None or tensor.is_contiguous()
