"""Linear layers on stored weights of 8-bit floating point: every backend against the definition and the slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor

from quire.ops.cpu.native_linear import NativeLinear
from quire.ops.interface.ops import KeepsRows
from quire.ops.interface.quantized_weight import PlainWeight, QuantizedRows, QuantizedWeight, StoredWeight, WeightForm
from quire.ops.reference.reference_ops import ReferenceOps
from tests.ops.backends import CPU_BACKENDS, Backend
from tests.ops.test_quantized_weights import FORMS, random_weight
from tests.ops.world import randn

pytestmark = pytest.mark.pairwise

Group = Literal[16, 32, 128]
GROUPS: tuple[Group, ...] = (16, 32, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# All codes but 0x7f and 0xff, which are no numbers.
CODES = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def float8_weight(group: Group, num_rows: int, width: int, seed: int = 0) -> QuantizedWeight:
    """Return a weight of random codes, each of which occurs where there are so many, and scales of either sign."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_rows * width, generator=generator) % len(CODES)
    scales = torch.randn(num_rows, width // group, generator=generator) * 1e-2
    rows = QuantizedRows(CODES[order].view(num_rows, width), scales)
    return QuantizedWeight(WeightForm(8, group, "float32", levels="e4m3"), (num_rows, width), rows.at, order.numel())


def assert_near(found: Tensor, x: Tensor, weight: Tensor, addend: Tensor, *, inner: Tensor | None = None) -> None:
    """Compare with sums in float64, up to the rounding of sums in float32 and one rounding of the result.

    Args:
        inner: part of `addend` up to which a sum may be rounded to the dtype before the rest is added; None for none.
    """
    exact = x.double() @ weight.double().T + addend.double()
    magnitude = x.double().abs() @ weight.double().abs().T
    error = (found.double() - exact).abs() - torch.finfo(found.dtype).eps * exact.abs()
    if inner is not None:
        error -= torch.finfo(found.dtype).eps * (exact - addend + inner).abs()
    assert bool((error <= 16 * 2.0**-24 * magnitude + 1e-30).all())


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_weight_is_exact(backend: Backend, group: Group, dtype: torch.dtype) -> None:
    """A row with a single one gives a column of the weight, rounded once to the dtype."""
    weight = float8_weight(group, 70, 256)
    linear = backend.make().pack_linear(StoredWeight((weight,), dtype))
    wanted = weight.dequantize().to(dtype)
    for num_rows in (1, 256):
        assert torch.equal(linear(torch.eye(256, dtype=dtype)[:num_rows]), wanted.T[:num_rows])
    assert isinstance(linear, KeepsRows)
    ids = torch.tensor([69, 0, 5, 5, 64])
    assert torch.equal(linear.rows(ids), wanted[ids])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "num_columns"), [(1280, 130), (128, 64), (384, 1), (640, 17)])
def test_numbers(backend: Backend, group: Group, dtype: torch.dtype, width: int, num_columns: int) -> None:
    """Columns that do not fill a panel, rows that lie apart, tiles and jobs of all sizes."""
    weight, bias = float8_weight(group, num_columns, width), randn(num_columns, seed=1, dtype=dtype)
    linear = backend.make().pack_linear(StoredWeight((weight,), dtype), bias)
    x = randn(200, width + 3, seed=2, dtype=dtype)[:, :width]
    residual = randn(200, num_columns, seed=3, dtype=dtype)
    for num_rows in (1, 2, 5, 6, 7, 100, 200):
        found = linear(x[:num_rows], residual[:num_rows])
        assert_near(found, x[:num_rows], weight.dequantize(), bias + residual[:num_rows].float())


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_get_the_same_bits_in_every_batch(backend: Backend, dtype: torch.dtype) -> None:
    ops = backend.make()
    if not ops.name.startswith("native"):
        pytest.skip("stock operators promise no such thing")
    for group in GROUPS:
        linear = ops.pack_linear(StoredWeight((float8_weight(group, 70, 512),), dtype))
        assert isinstance(linear, NativeLinear)
        x = randn(140, 512, dtype=dtype)
        whole = linear(x)
        for start, stop in ((0, 1), (3, 5), (7, 20), (39, 40), (90, 140)):
            assert torch.equal(linear(x[start:stop]), whole[start:stop])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("num_columns", [64, 7])
def test_gated_and_beside_other_forms(backend: Backend, num_columns: int) -> None:
    parts = (float8_weight(128, num_columns, 512), random_weight(FORMS["q8_0"], num_columns, 512))
    x = randn(9, 512)
    for weight in (StoredWeight(parts[:1] * 2, torch.float32), StoredWeight(parts, torch.float32)):
        linear = backend.make().pack_linear(weight, gate="silu")
        twin = ReferenceOps().pack_linear(weight, gate="silu")
        torch.testing.assert_close(linear(x), twin(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_beside_plain_parts(backend: Backend, dtype: torch.dtype) -> None:
    """Parts that are not quantised keep their values, and the others theirs."""
    stored, plain = float8_weight(128, 40, 256), randn(6, 256, seed=4, dtype=dtype)
    weight = StoredWeight((stored, PlainWeight(plain), stored.rows(slice(0, 30)), stored.rows(slice(1, 3))), dtype)
    whole = torch.cat((stored.dequantize(), plain.float(), stored.dequantize()[:30], stored.dequantize()[1:3]))
    assert torch.equal(weight.dequantize(), whole.to(dtype))
    order = torch.tensor([41, 3, 45, 46, 0])
    assert torch.equal(weight.rows(order).dequantize(), whole[order].to(dtype))
    bias, x, residual = randn(78, dtype=dtype), randn(9, 256, dtype=dtype), randn(9, 78, seed=1, dtype=dtype)
    linear = backend.make().pack_linear(weight, bias)
    # Stock operators round the product of a plain part before they add the residual.
    inner = None if backend.make().name.startswith("native") else bias
    assert_near(linear(x, residual), x, whole, bias + residual.float(), inner=inner)
    gated = backend.make().pack_linear(weight, gate="silu")
    twin = ReferenceOps().pack_linear(weight, gate="silu")
    torch.testing.assert_close(gated(x), twin(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_rows_that_are_no_numbers_stay_so(backend: Backend) -> None:
    linear = backend.make().pack_linear(StoredWeight((float8_weight(128, 20, 256),), torch.float32))
    x = randn(8, 256)
    x[1, 3], x[2, 200] = torch.nan, torch.inf
    found = linear(x)
    assert not found[1].isfinite().any()
    assert not found[2].isfinite().any()
    assert bool(found[[0, *range(3, 8)]].isfinite().all())
