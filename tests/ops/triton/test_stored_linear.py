"""Triton's products with stored weights, interpreted or on a GPU, against the slow twin, which is on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from quire.ops.interface.ops import KeepsRows, Linear, RoundsInputs
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.reference.reference_ops import ReferenceOps
from tests.ops.test_float8_weights import GROUPS, Group, assert_near, float8_weight
from tests.ops.test_quantised_linear import assert_same_numbers
from tests.ops.test_quantized_weights import FLOAT8, FORMS, random_weight
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


def assert_groups_apart(multiply: Callable[[Tensor], Tensor], group: int = 32) -> None:
    """Check that a large value of a row of 256 rounds the inputs of its own group only: one row, split-K, and many."""
    x, is_beside = randn(40, 256, seed=1).to(DEVICE), (torch.arange(256) // group != 70 // group).to(DEVICE)
    x[:, 70] *= 1000.0
    for num_rows in (1, 40):
        rows = x[:num_rows]
        apart = multiply(rows * is_beside) + multiply(rows * ~is_beside)
        torch.testing.assert_close(multiply(rows), apart, rtol=0.0, atol=1e-6 * apart.abs().max().item())


@pytest.mark.parametrize("name", FORMS)
def test_a_large_value_rounds_its_own_group_only(name: str) -> None:
    assert_groups_apart(make_ops().pack_linear(StoredWeight((random_weight(FORMS[name], 70, 256),), torch.float32)))


def assert_same_bits(linear: Linear, width: int) -> None:
    """Check that rows get the same bits in every batch; the layer's inputs are not divided among programs (split-K)."""
    x = randn(70, width, seed=1).to(DEVICE)
    together = linear(x)
    for first, last in ((0, 1), (5, 7), (60, 70), (20, 60)):
        assert torch.equal(linear(x[first:last]), together[first:last])


@pytest.mark.parametrize("name", FORMS)
def test_a_row_gets_the_same_bits_in_every_batch(name: str) -> None:
    ops = make_ops()
    ops.device.num_processors = 1
    assert_same_bits(ops.pack_linear(StoredWeight((random_weight(FORMS[name], 200, 512),), torch.float32)), 512)


@pytest.mark.parametrize(
    ("names", "rounds_inputs"),
    [(("q4_k", "q4_k", "q6_k"), True), (("q2_k", "q8_0", "q2_k"), True), (("q6_k", "float8 of 32"), False)],
    ids=str,
)
def test_parts_are_multiplied_by_rows_in_groups_of_their_own(names: tuple[str, ...], rounds_inputs: bool) -> None:
    """Groups of 16 and of 32, and rows as they are; float32 in and out where all are quantised, as heads have them."""
    parts = [random_weight((FORMS | FLOAT8)[name], 20 * (idx + 1), 512, idx) for idx, name in enumerate(names)]
    weight = StoredWeight(tuple(parts), torch.bfloat16)
    linear, twin = make_ops().pack_linear(weight), ReferenceOps().pack_linear(weight)
    assert isinstance(linear, RoundsInputs)
    assert linear.rounds_inputs == rounds_inputs
    x = randn(9, 512, seed=1)
    found, expected = linear(x.to(DEVICE)), twin(x)
    assert found.dtype == torch.float32
    if rounds_inputs:
        assert_same_numbers(found.cpu(), expected)
    else:
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [32, 96, 160, 48, 80])
def test_an_odd_number_of_groups(dtype: torch.dtype, width: int) -> None:
    """Groups of 32, and of 16 where the last 32 inputs are not whole."""
    forms = [FORMS[name]._replace(group=16 if width % 32 else 32) for name in ("awq", "w4a16", "w8a16")]
    parts = [random_weight(form, 20, width, seed) for seed, form in enumerate(forms)]
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
