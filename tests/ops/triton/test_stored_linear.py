"""Triton's products with stored weights, interpreted or on a GPU, against the slow twin, which is on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.ops.interface import KeepsRows
from quire.ops.quantized_weight import StoredWeight
from quire.ops.reference import ReferenceOps
from tests.ops.test_float8_weights import GROUPS, Group, assert_near, float8_weight
from tests.ops.test_quantised_linear import assert_same_numbers
from tests.ops.test_quantized_weights import FORMS, random_weight
from tests.ops.triton.device import DEVICE, IS_INTERPRETED, MARKS, make_ops
from tests.ops.world import randn

pytestmark = MARKS


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", FORMS)
def test_numbers(name: str) -> None:
    """One row and several, columns that fill no tile, rows that lie apart, bias and residual."""
    weight, bias = random_weight(FORMS[name], 70, 256), randn(70, seed=1)
    linear = make_ops().pack_linear(StoredWeight((weight,), torch.float32), bias.to(DEVICE))
    twin = ReferenceOps().pack_linear(StoredWeight((weight,), torch.float32), bias)
    rows, residual = randn(18, 259, seed=2), randn(18, 70, seed=3)
    x, given, added = rows[:, :256], rows.to(DEVICE)[:, :256], residual.to(DEVICE)
    expected = twin(x, residual)
    for num_rows in (1, 18):
        assert_same_numbers(linear(given[:num_rows], added[:num_rows]).cpu(), expected[:num_rows])
    assert_same_numbers(linear(given[:1]).cpu(), twin(x[:1]))
    assert isinstance(linear, KeepsRows)
    ids = torch.tensor([69, 0, 5, 5])
    torch.testing.assert_close(linear.rows(ids.to(DEVICE)).cpu(), weight.dequantize(ids), rtol=0, atol=0)
    if IS_INTERPRETED:  # a GPU ends the process's use of it instead
        with pytest.raises(IndexError, match="rows are from 0 to 69"):
            linear.rows(torch.tensor([3, 70]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [32, 96, 160])
def test_an_odd_number_of_groups(dtype: torch.dtype, width: int) -> None:
    parts = [random_weight(FORMS[name], 20, width, idx) for idx, name in enumerate(("awq", "w4a16", "w8a16"))]
    weight, x = StoredWeight(tuple(parts), dtype), randn(3, width, dtype=dtype)
    linear, twin = make_ops().pack_linear(weight, gate="silu"), ReferenceOps().pack_linear(weight, gate="silu")
    torch.testing.assert_close(linear(x.to(DEVICE)).cpu(), twin(x), rtol=2e-2, atol=1e-3)
    linear = make_ops().pack_linear(weight)
    assert isinstance(linear, KeepsRows)
    ids = torch.arange(60, device=DEVICE)
    torch.testing.assert_close(linear.rows(ids).cpu(), weight.dequantize(), rtol=0, atol=0)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float8(group: Group, dtype: torch.dtype) -> None:
    weight = float8_weight(group, 70, 256)
    x, residual = randn(3, 256, dtype=dtype, seed=1), randn(3, 70, dtype=dtype, seed=2)
    found = make_ops().pack_linear(StoredWeight((weight,), dtype))(x.to(DEVICE), residual.to(DEVICE))
    assert found.dtype == dtype
    assert_near(found.cpu(), x, weight.dequantize(), residual)


def test_rows_that_are_no_numbers() -> None:
    weight = random_weight(FORMS["q4_0"], 8, 64)
    x = randn(5, 64)
    x[0], x[1, 3], x[2, 4] = 0.0, float("nan"), float("inf")
    x[3] *= 1e-36
    linear, twin = (ops.pack_linear(StoredWeight((weight,), torch.float32)) for ops in (make_ops(), ReferenceOps()))
    assert_same_numbers(linear(x.to(DEVICE)).cpu(), twin(x))
