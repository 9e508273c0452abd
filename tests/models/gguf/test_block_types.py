"""Blocks of random bytes have bit for bit the values that another library gives them."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from quire.models.gguf.block_types import BLOCK_TYPES, BlockType
from quire.models.gguf.tensor_types import Q4_0
from quire.ops.cpu.native_library import NativeLibrary, runnable_libraries
from quire.ops.interface.quantized_weight import SUPER_GROUP, QuantizedRows, QuantizedWeight, StoredWeight, dequantize
from quire.ops.interface.weight_memory import WeightMemory

# Offsets of the float16 fields of a block, whose random bytes must be finite numbers.
FLOAT16_FIELDS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip

each_type = pytest.mark.parametrize("block", BLOCK_TYPES.values(), ids=lambda block: block.type.name)


def random_rows(block: BlockType, num_rows: int, num_blocks: int, seed: int = 0) -> torch.Tensor:
    """Return the bytes of rows, uint8 [N, bytes of a row]: any bytes, but float16 fields are finite."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_rows, num_blocks, block.type.block_bytes), np.uint8)
    for start in FLOAT16_FIELDS[block.type.name]:
        # An exponent whose bits are not all set; signs, zeros and subnormal numbers are among the values.
        high = raw[..., start + 1]
        raw[..., start + 1] = np.where((high & 0x7C) == 0x7C, high & 0xBF, high)
    return torch.from_numpy(raw.reshape(num_rows, -1))


def expected(block: BlockType, raw: torch.Tensor) -> torch.Tensor:
    # The largest exponents of MXFP4 overflow, here as there.
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType(block.type.id)))


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32
    assert ours.shape == theirs.shape
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@each_type
@pytest.mark.parametrize("num_rows", [1, 7, 33])
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_values_are_those_of_the_format(block: BlockType, num_rows: int, num_blocks: int) -> None:
    raw = random_rows(block, num_rows, num_blocks, seed=num_rows * num_blocks)
    assert_same_bits(dequantize(block.form, block.unpack(raw)), expected(block, raw))


@each_type
def test_every_byte_at_every_offset(block: BlockType) -> None:
    # In 256 rows each offset of a block has each value of a byte once, beside values of other offsets that vary.
    size = block.type.block_bytes
    rng = np.random.default_rng(0)
    raw = torch.from_numpy(rng.permuted(np.tile(np.arange(256, dtype=np.uint8), (8 * size, 1)), axis=1))
    raw = raw.reshape(8, size, 256).transpose(1, 2).reshape(8 * 256, size)
    values = expected(block, raw)
    is_finite = values.isfinite().all(1)
    raw, values = raw[is_finite], values[is_finite]
    # Of a float16 field all but infinities and NaN, and of the exponent of MXFP4 all but the largest.
    exponents = {start + 1 for start in FLOAT16_FIELDS[block.type.name]} or {0}
    assert {offset for offset in range(size) if len(np.unique(raw[:, offset].numpy())) < 256} == exponents
    assert_same_bits(dequantize(block.form, block.unpack(raw)), values)


@each_type
def test_rows_may_be_strided_and_none_at_all(block: BlockType) -> None:
    raw = random_rows(block, 9, 3)
    rows = slice(1, None, 3)
    assert_same_bits(dequantize(block.form, block.unpack(raw[rows])), expected(block, raw[rows].clone()))
    assert block.unpack(raw[:0]).codes.shape == (0, 3 * block.type.block_values)


@each_type
def test_unpacked_rows_are_as_the_form_says(block: BlockType) -> None:
    form, raw = block.form, random_rows(block, 5, 4)
    before = raw.clone()
    rows = block.unpack(raw)
    width = 4 * block.type.block_values
    shape, dtype = (5, width // form.group), torch.float16
    if form.scale == "two_level":
        assert rows.super_scales is not None
        check_tensor(rows.super_scales, (5, width // SUPER_GROUP), torch.float16)
        check_tensor(rows.scales, shape, torch.int8)
        dtype = torch.uint8
    else:
        check_tensor(rows.scales, shape, getattr(torch, form.scale))
    check_tensor(rows.codes, (5, width), torch.uint8)
    assert int(rows.codes.max()) < 1 << form.bits
    assert (rows.mins is not None) == form.has_mins
    if rows.mins is not None:
        check_tensor(rows.mins, shape, dtype)
    # Nothing is changed in the file's bytes, and nothing refers to them.
    assert torch.equal(raw, before)
    for unpacked in (rows, block.unpack(raw[:1, : block.type.block_bytes])):
        assert raw.untyped_storage().data_ptr() not in storage_of(unpacked)


def check_tensor(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)


def storage_of(rows: QuantizedRows) -> set[int]:
    """Return the addresses of the memory of unpacked rows."""
    return {part.untyped_storage().data_ptr() for part in rows if part is not None}


@each_type
def test_codes_without_levels_are_centred_on_their_offset(block: BlockType) -> None:
    form = block.form
    if form.levels is None and not form.has_mins:
        assert form.offset == 1 << (form.bits - 1)
    else:
        assert form.offset == 0


@each_type
@pytest.mark.parametrize("has_index", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
def test_kernels_pack_blocks_as_unpacked_rows(block: BlockType, has_index: bool, is_gated: bool) -> None:
    # 2 * 75 rows: vectors of columns, and single ones; both halves of a gated weight in one part and in two.
    width = 512 // block.type.block_values * block.type.block_values
    raw = random_rows(block, 200, width // block.type.block_values)
    whole = QuantizedWeight(
        block.form, (200, width), lambda rows: block.unpack(raw[rows]), raw.nbytes, block.stored(raw)
    )
    rows = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:150] if has_index else slice(50, None)
    halves = slice(None), slice(75), slice(75, None)
    weights = [whole.rows(rows).rows(part) for part in (halves[:1] if has_index else halves[1:])]
    unpacked = [replace(weight, blocks=None) for weight in weights]
    for path in runnable_libraries().values():
        kernels = NativeLibrary(path.stem.removeprefix("libquire_"), path).quantized
        assert kernels.number_of(block.form) >= 0
        packed, expected = (
            kernels.pack_weight(WeightMemory(), StoredWeight(tuple(parts), torch.float32), is_gated)[-1]
            for parts in (weights, unpacked)
        )
        assert packed.any()
        assert torch.equal(packed, expected)


@each_type
def test_values_are_numbers_where_the_factors_are(block: BlockType) -> None:
    """A look at the factors, which `check_finite` takes, is one at all values."""
    raw = random_rows(block, 8, 2)
    assert block.stored(raw).factors_of(1).isfinite().all()
    for place in range(0, block.type.block_bytes - 1, 2):
        broken, infinity = raw.clone(), torch.tensor([0, 0x7C], dtype=torch.uint8)
        broken.view(len(broken), 2, -1)[5, 1, place : place + 2] = infinity
        is_finite = dequantize(block.form, block.unpack(broken)).isfinite().all()
        assert block.stored(broken).factors_of(5).isfinite().all() == is_finite
        assert block.stored(broken)._replace(row_ids=torch.tensor([0, 5])).factors_of(1).isfinite().all() == is_finite
        assert block.stored(broken).factors_of(2).isfinite().all()


def test_kernels_leave_blocks_that_they_do_not_know_to_the_reader() -> None:
    block = BLOCK_TYPES[Q4_0.id]
    raw = random_rows(block, 64, 2)
    unknown = block.stored(raw)._replace(type_id=99)
    weight = QuantizedWeight(block.form, (64, 64), lambda rows: block.unpack(raw[rows]), raw.nbytes, unknown)
    for path in runnable_libraries().values():
        kernels = NativeLibrary(path.stem.removeprefix("libquire_"), path).quantized
        packed, expected = (
            kernels.pack_weight(WeightMemory(), StoredWeight((part,), torch.float32), False)[-1]
            for part in (weight, replace(weight, blocks=None))
        )
        assert torch.equal(packed, expected)


RUN = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
PARALLEL_FOR = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)


def whole_weight(block: BlockType, raw: torch.Tensor) -> QuantizedWeight:
    shape = len(raw), raw.shape[1] // block.type.block_bytes * block.type.block_values
    return QuantizedWeight(block.form, shape, lambda rows: block.unpack(raw[rows]), raw.nbytes, block.stored(raw))


def packed_in_parts(path: Path, weight: QuantizedWeight, num_threads: int) -> tuple[torch.Tensor, int]:
    """Pack a weight with what stands for torch's threads; return the panels and the number of parts."""
    library, parts = NativeLibrary(path.stem.removeprefix("libquire_"), path), []

    @PARALLEL_FOR
    def divide(begin: int, end: int, grain: int, run: int, context: int) -> int:
        size = max(grain, -(-(end - begin) // num_threads))
        for first in range(begin, end, size):
            parts.append(first)
            RUN(run)(first, min(first + size, end), context)
        return 0

    ctypes.CDLL(str(path)).quire_use_threads(divide, None)
    try:
        panels = library.quantized.pack_weight(WeightMemory(), StoredWeight((weight,), torch.float32), False)[-1]
    finally:
        NativeLibrary(library.level, path)  # with torch's threads again
    return panels, len(parts)


def test_threads_share_large_weights_only() -> None:
    """Threads that wait for one another at each of hundreds of small weights load a model in ten times the time."""
    block = BLOCK_TYPES[Q4_0.id]
    small, large = (whole_weight(block, random_rows(block, num_rows, 32)) for num_rows in (2048, 10240))
    for path in runnable_libraries().values():
        assert packed_in_parts(path, small, 8)[1] == 0
        whole, shared = (packed_in_parts(path, large, num_threads) for num_threads in (1, 8))
        assert (whole[1], shared[1]) == (1, 3)
        assert torch.equal(whole[0], shared[0])
