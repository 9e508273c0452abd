"""Linear layers on stored quantised weights: every backend and form against the slow twin and the definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.config import Quantization
from quire.ops.cpu.native_linear import NativeLinear
from quire.ops.interface.ops import KeepsRows
from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, StoredWeight, WeightForm
from quire.ops.reference.reference_ops import ReferenceOps
from tests.ops.backends import CPU_BACKENDS, NATIVE, Backend
from tests.ops.test_quantised_linear import assert_same_numbers
from tests.ops.world import randn

pytestmark = pytest.mark.pairwise

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FORMS = {
    "q4_0": WeightForm(4, 32, "float16", offset=8),
    "q4_1": WeightForm(4, 32, "float16", has_mins=True),
    "q5_0": WeightForm(5, 32, "float16", offset=16),
    "q5_1": WeightForm(5, 32, "float16", has_mins=True),
    "q8_0": WeightForm(8, 32, "float16", offset=128),
    "q2_k": WeightForm(4, 16, "two_level", has_mins=True),
    "q3_k": WeightForm(4, 16, "two_level", offset=4),
    "q4_k": WeightForm(4, 32, "two_level", has_mins=True),
    "q5_k": WeightForm(5, 32, "two_level", has_mins=True),
    "q6_k": WeightForm(6, 16, "two_level", offset=32),
    "iq4_nl": WeightForm(4, 32, "float16", levels=TABLE),
    "iq4_xs": WeightForm(4, 32, "two_level", levels=TABLE),
    "mxfp4": WeightForm(4, 32, "bfloat16", levels=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
    "w4a16": WeightForm(4, 32, "bfloat16", offset=8),
    "w4a16 asymmetric": WeightForm(4, 32, "bfloat16", has_zero_points=True),
    "awq": WeightForm(4, 32, "float16", has_zero_points=True),
    "w8a16": WeightForm(8, 32, "bfloat16", offset=128),
    "gptq of eight bits": WeightForm(8, 32, "float16", has_zero_points=True),
    "w8a16 asymmetric": WeightForm(8, 32, "bfloat16", has_zero_points=True),
}

FLOAT8 = {
    "float8 of 16": WeightForm(8, 16, "float32", levels="e4m3"),
    "float8 of 32": WeightForm(8, 32, "float32", levels="e4m3"),
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_weight(form: WeightForm, num_rows: int, width: int, seed: int = 0) -> QuantizedWeight:
    """Return a weight of random codes, the extreme ones among them, and of scales of all magnitudes that matter."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    num_groups = width // form.group
    codes = integers(0, 1 << form.bits, num_rows, width).to(torch.uint8)
    codes[0], codes[-1, : width // 2] = 0, (1 << form.bits) - 1
    if form.levels == "e4m3":
        codes[(codes & 127) == 127] = 126
    mins = zeros = super_scales = super_mins = None
    dtype = torch.float16 if form.scale == "two_level" else getattr(torch, form.scale)
    if form.scale == "two_level":
        scales = integers(-32 if not form.has_mins else 0, 64, num_rows, num_groups).to(torch.int8)
        super_scales = (torch.rand(num_rows, width // 256, generator=generator) * 1e-3).half()
        if form.has_mins:
            mins = integers(0, 64, num_rows, num_groups).to(torch.uint8)
            super_mins = (torch.rand(num_rows, width // 256, generator=generator) * 1e-3).half()
    else:
        scales = (torch.randn(num_rows, num_groups, generator=generator) * 1e-2).to(dtype)
        if form.has_mins:
            mins = (torch.randn(num_rows, num_groups, generator=generator) * 1e-2).to(dtype)
    if form.has_zero_points:
        zeros = integers(0, 1 << form.bits, num_rows, num_groups).to(torch.uint8)
    rows = QuantizedRows(codes, scales, mins, zeros, super_scales, super_mins)
    return QuantizedWeight(form, (num_rows, width), rows.at, codes.nbytes * form.bits // 8)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("width", "num_columns"), [(1280, 130), (512, 64), (256, 1), (768, 17)])
def test_numbers(backend: Backend, name: str, width: int, num_columns: int) -> None:
    """Widths past a piece, columns that do not fill a panel, rows that lie apart, tiles and jobs of all sizes."""
    weight, bias = random_weight(FORMS[name], num_columns, width), randn(num_columns, seed=1)
    linear = backend.make().pack_linear(StoredWeight((weight,), torch.float32), bias)
    twin = ReferenceOps().pack_linear(StoredWeight((weight,), torch.float32), bias)
    x = randn(200, width + 3, seed=2)[:, :width]
    residual = randn(200, num_columns, seed=3)
    expected = twin(x, residual)
    for num_rows in (1, 2, 3, 5, 7, 100, 200):
        assert_same_numbers(linear(x[:num_rows], residual[:num_rows]), expected[:num_rows])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_exact(backend: Backend, name: str, dtype: torch.dtype) -> None:
    weight = random_weight(FORMS[name], 83, 512)
    linear = backend.make().pack_linear(StoredWeight((weight.rows(slice(0, 40)), weight.rows(slice(40, 83))), dtype))
    assert isinstance(linear, KeepsRows)
    ids = torch.tensor([0, 82, 5, 5, 40, 39, 16, 64])
    torch.testing.assert_close(linear.rows(ids), weight.dequantize(ids).to(dtype), rtol=0, atol=0)
    for wrong in (-1, 83):
        with pytest.raises(IndexError, match="rows are from 0 to 82"):
            linear.rows(torch.tensor([3, wrong]))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(
    "names", [("q4_k", "q4_k", "q6_k"), ("q8_0", "q4_0", "q8_0"), ("iq4_xs", "q5_k", "mxfp4")], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_several_forms(backend: Backend, names: tuple[str, ...], dtype: torch.dtype) -> None:
    """The parts of a layer, as of queries, keys and values, may be stored in different forms."""
    parts = [random_weight(FORMS[name], 20 * (idx + 1), 512, idx) for idx, name in enumerate(names)]
    bias, x, residual = randn(120, dtype=dtype), randn(9, 512, dtype=dtype), randn(9, 120, seed=1, dtype=dtype)
    weight = StoredWeight(tuple(parts), dtype)
    linear = backend.make().pack_linear(weight, bias)
    twin = ReferenceOps().pack_linear(weight, bias)
    assert_same_numbers(linear(x, residual), twin(x, residual))
    ids = torch.arange(0, 120, 7)
    assert isinstance(linear, KeepsRows)
    whole = torch.cat([part.dequantize() for part in parts])
    torch.testing.assert_close(linear.rows(ids), whole[ids].to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("names", [("q4_k", "q4_k"), ("q6_k", "q4_k")], ids=str)
@pytest.mark.parametrize("num_columns", [64, 192, 7])
def test_gated(backend: Backend, names: tuple[str, str], num_columns: int) -> None:
    """Gates and what they multiply may be of different forms, and need not fill panels."""
    parts = [random_weight(FORMS[name], num_columns, 512, idx) for idx, name in enumerate(names)]
    weight, x = StoredWeight(tuple(parts), torch.float32), randn(5, 512)
    linear = backend.make().pack_linear(weight, gate="silu")
    twin = ReferenceOps().pack_linear(weight, gate="silu")
    torch.testing.assert_close(linear(x), twin(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_rows_get_the_same_bits_in_every_batch(backend: Backend) -> None:
    ops = backend.make()
    if not ops.name.startswith("native"):
        pytest.skip("stock operators promise no such thing")
    for name in ("q4_k", "q6_k", "q8_0", "iq4_nl", "awq"):
        linear = ops.pack_linear(StoredWeight((random_weight(FORMS[name], 70, 512),), torch.float32))
        assert isinstance(linear, NativeLinear)
        x = randn(40, 512)
        whole = linear(x)
        for start, stop in ((0, 1), (3, 5), (7, 20), (39, 40)):
            assert torch.equal(linear(x[start:stop]), whole[start:stop])


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_k", "q6_k", "awq"])
def test_ranks_that_have_slices_of_the_inputs_add_up_to_the_same_bits(backend: Backend, name: str) -> None:
    ops, form, width = backend.make(), FORMS[name], 2048
    weight = random_weight(form, 70, width)
    whole = ops.pack_linear(StoredWeight((weight,), torch.float32), num_slices=4)
    in_order = ops.pack_linear(StoredWeight((weight,), torch.float32))

    def parts_of(x: torch.Tensor, size: int) -> list[torch.Tensor]:
        products = []
        for first in range(0, width, width // size):
            part = weight.columns(first, first + width // size)
            assert part is not None
            linear = ops.pack_linear(StoredWeight((part,), torch.float32), num_slices=4 // size)
            products.append(linear(x[:, first : first + width // size]))
        return products

    # A row, tiles of a few, and more than are multiplied by packed weights.
    for num_rows in (1, 5, 40):
        x = randn(num_rows, width, seed=2)
        found, two, four = whole(x), parts_of(x, 2), parts_of(x, 4)
        assert torch.equal(found, two[0] + two[1])
        assert torch.equal(found, (four[0] + four[1]) + (four[2] + four[3]))
        assert not torch.equal(found, in_order(x))


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("bits_and_group", [(8, 16), (8, 32), (6, 32), (4, 32)])
@pytest.mark.parametrize("width", [704, 2048])
def test_slices_of_weights_that_are_rounded(backend: Backend, bits_and_group: tuple[int, int], width: int) -> None:
    bits, group = bits_and_group
    quantization: Quantization = "int8" if bits == 8 else "int4"
    ops, weight, x = backend.make(quantization=quantization), randn(70, width), randn(5, width, seed=2)
    whole = ops.pack_linear(weight, min_bits=bits, num_slices=4, max_group=group)
    first, second = (
        ops.pack_linear(half, min_bits=bits, num_slices=2, max_group=group)(rows.contiguous())
        for half, rows in zip(weight.chunk(2, 1), x.chunk(2, 1), strict=True)
    )
    assert torch.equal(whole(x), first + second)


def test_rows_of_a_weight_in_another_order() -> None:
    weight = random_weight(FORMS["q4_k"], 50, 256)
    order = torch.tensor([41, 3, 3, 0, 49])
    part = weight.rows(order)
    assert part.shape == (5, 256)
    assert torch.equal(part.dequantize(), weight.dequantize(order))
    assert torch.equal(part.rows(slice(1, 4)).dequantize(), weight.dequantize(order[1:4]))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", ["w4a16", "awq", "gptq of eight bits", "float8 of 16", "float8 of 32"])
@pytest.mark.parametrize("width", [32, 96, 160])
def test_widths_that_fill_no_vector_of_words(backend: Backend, name: str, width: int) -> None:
    """The last groups of a row are packed by themselves, and so are parts that begin within a vector of columns."""
    weight = random_weight((FORMS | FLOAT8)[name], 150, width)
    parts = (weight.rows(slice(0, 5)), weight.rows(slice(5, 91)), weight.rows(slice(91, 150)))
    linear = backend.make().pack_linear(StoredWeight(parts, torch.float32))
    assert isinstance(linear, KeepsRows)
    assert torch.equal(linear.rows(torch.arange(150)), weight.dequantize())


def test_rows_of_parts_of_several_forms() -> None:
    parts = [random_weight(FORMS[name], 9, 256, idx) for idx, name in enumerate(("q4_k", "q6_k", "q4_k"))]
    weight, whole = StoredWeight(tuple(parts), torch.float32), torch.cat([part.dequantize() for part in parts])
    for index in (torch.arange(26, -1, -1), torch.tensor([3, 1, 12, 2, 20, 26, 0]), slice(5, 20, 2)):
        assert torch.equal(weight.rows(index).dequantize(), whole[index])
    assert weight.rows(slice(0, 9)).num_forms == 1
    assert weight.num_forms == 2
