"""Packed weights of three quarters of the bytes: the bits of the plain product, whatever the weights are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import load_decoder
from quire.ops import make_ops
from quire.ops.cpu.native_library import NativeLibrary
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.ops import KeepsRows
from tests.ops.backends import LIBRARIES
from tests.ops.world import randn

CPU = torch.device("cpu")
LEVELS = ("avx2", "avx_vnni", "avx512", "avx512_bf16")
BLOCK = 64 * 32


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=LEVELS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    level = request.param
    if level not in LIBRARIES:
        pytest.skip(f"no {level} kernels were built for this CPU")
    return NativeLibrary(level, LIBRARIES[level])


def assert_same_bits(library: NativeLibrary, weight: Tensor, num_rows: int, *, share: float = 1.01) -> None:
    """Compare with the plain product, on rows that lie apart; `share` is what packing may leave."""
    assert library.lossless is not None
    num_columns, width = weight.shape
    lossless, plain = NativeOps(library, is_lossless=True), NativeOps(library)
    x = randn(num_rows, width + 3, dtype=torch.bfloat16)[:, :width]
    residual = randn(num_rows, num_columns, dtype=torch.bfloat16, seed=1)
    for bias in (None, randn(num_columns, dtype=torch.bfloat16, seed=2)):
        packed, twin = lossless.pack_linear(weight, bias), plain.pack_linear(weight, bias)
        for addend in (None, residual):
            found, expected = packed(x, addend), twin(x, addend)
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
        if num_columns > 1:
            ids = torch.randint(num_columns, (2 * num_rows,), generator=torch.Generator().manual_seed(3))[::2]
            for layer in (packed, twin):
                assert isinstance(layer, KeepsRows)
                assert torch.equal(layer.rows(ids).view(torch.int16), weight[ids].view(torch.int16))
    assert lossless.lossless_share <= share


def of_bits(bits: Tensor, width: int) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16).view(-1, width)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 16, 17, 70, 97])
@pytest.mark.parametrize(("width", "num_columns"), [(1100, 130), (512, 64), (34, 70), (2, 1)])
def test_weights_like_trained_ones(library: NativeLibrary, width: int, num_columns: int, num_rows: int) -> None:
    """Widths past a piece, ragged ones, columns that do not fill a panel."""
    weight = randn(num_columns, width, dtype=torch.bfloat16) * width**-0.5
    # Tables, places and columns that are not there count too.
    share = 0.765 if width == 512 else 64
    assert_same_bits(library, weight, num_rows, share=share)


@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_weights_of_all_kinds(library: NativeLibrary, num_rows: int) -> None:
    """Every value there is, not a number and infinite ones too, in any order and in their own."""
    every = torch.arange(1 << 16)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    assert_same_bits(library, of_bits(every[order], 512), num_rows)
    assert_same_bits(library, of_bits(every, 512), num_rows)


@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_zeros_and_the_smallest_and_the_largest(library: NativeLibrary, num_rows: int) -> None:
    small = torch.tensor([0, 1 << 15, 1, 0x7F, 0x8001, 0x80])
    large = torch.tensor([0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7F7F])
    for bits in (small, large, torch.cat((small, large, torch.tensor([0x3F80, 0xBF81])))):
        drawn = bits[torch.randint(len(bits), (4 * BLOCK,), generator=torch.Generator().manual_seed(1))]
        assert_same_bits(library, of_bits(drawn, 64), num_rows, share=0.77)
    assert_same_bits(library, torch.zeros(64, 64, dtype=torch.bfloat16), num_rows, share=0.77)


def test_a_table_that_is_just_full_and_one_that_is_not(library: NativeLibrary) -> None:
    low = torch.arange(BLOCK) % 256
    for num_high, share in ((1, 0.77), (15, 0.77), (16, 0.77), (17, 1.02)):
        high = torch.arange(BLOCK) % num_high + 0x36
        assert_same_bits(library, of_bits(high << 8 | low, 32), 3, share=share)
    # Coded and raw blocks in turns, in one panel.
    high = torch.where(torch.arange(4 * BLOCK) % 128 < 64, torch.arange(4 * BLOCK) % 32, 7) + 0x30
    assert_same_bits(library, of_bits(high << 8 | 5, 128), 3, share=0.9)


def test_threads_change_nothing(library: NativeLibrary) -> None:
    weight = randn(1000, 200, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for num_rows in (1, 70):
                assert_same_bits(library, weight, num_rows)
    finally:
        torch.set_num_threads(before)


def test_what_is_reached_is_said(library: NativeLibrary) -> None:
    ops = NativeOps(library, is_lossless=True)
    assert ops.name == f"native ({library.level})"
    ops.pack_linear(randn(640, 512, dtype=torch.bfloat16))
    assert ops.name.startswith(f"native ({library.level}), weights packed lossless to 75.")


def test_it_is_refused_where_kernels_have_no_such_product() -> None:
    with pytest.raises(ConfigError, match=r"avx2 or better.*use 'plain'") as caught:
        make_ops(CPU, "torch", weight_packing="lossless")
    assert caught.value.field == "weight_packing"
    assert make_ops(CPU, "torch", weight_packing="plain").name == make_ops(CPU, "torch").name


def test_it_is_refused_beside_rounded_weights() -> None:
    with pytest.raises(ConfigError, match="quantization 'int8' rounds them") as caught:
        make_ops(CPU, "auto", "int8", "lossless")
    assert caught.value.field == "weight_packing"


def test_it_is_refused_for_other_weights_than_bfloat16() -> None:
    with pytest.raises(ConfigError, match="for dtype bfloat16, and weights are of float32") as caught:
        load_decoder(Checkpoint.open("bundled"), device="cpu", dtype=torch.float32, weight_packing="lossless")
    assert caught.value.field == "weight_packing"
