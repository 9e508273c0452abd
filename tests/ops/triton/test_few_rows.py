"""Products of one and two rows with plain weights, against the slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from quire.ops.interface.ops import Activation
from tests.ops.triton.device import MARKS, make_ops, randn
from tests.ops.world import REFERENCE, assert_near

from quire.ops.triton.linear.few_rows import FewRowsTile, is_readable, multiply  # isort: skip - the modules above skip without Triton

pytestmark = MARKS

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize(("num_columns", "width"), [(12, 128), (48, 1152), (136, 512)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(dtype: torch.dtype, num_rows: int, num_columns: int, width: int, has_bias: bool) -> None:
    """Rows apart from each other, with a residual and without, which stays as it is."""
    weight = randn(num_columns, width, dtype=dtype) * width**-0.5
    bias = randn(num_columns, dtype=dtype, seed=1) if has_bias else None
    x = randn(num_rows, width + 8, dtype=dtype, seed=2)[:, :width]
    residual = randn(num_rows, num_columns, dtype=dtype, seed=3)
    linear, twin = (ops.pack_linear(weight, bias) for ops in (make_ops(), REFERENCE))
    kept = residual.clone()
    assert_near(linear(x), twin(x))
    assert_near(linear(x, residual), twin(x, residual))
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_products(dtype: torch.dtype, num_rows: int, activation: Activation, has_bias: bool) -> None:
    weight, x = randn(80, 256, dtype=dtype) / 16, randn(num_rows, 256, dtype=dtype, seed=2)
    bias = randn(80, dtype=dtype, seed=1) if has_bias else None
    linear, twin = (ops.pack_linear(weight, bias, gate=activation) for ops in (make_ops(), REFERENCE))
    assert_near(linear(x), twin(x), factor=2)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_what_is_added_before_the_gate(num_rows: int) -> None:
    """What adapters add to gates and to what these gate."""
    weight, x = randn(80, 256, dtype=torch.bfloat16) / 16, randn(num_rows, 256, dtype=torch.bfloat16, seed=2)
    residual = randn(num_rows, 80, dtype=torch.bfloat16, seed=3)
    linear, twin = (ops.pack_linear(weight, gate="silu") for ops in (make_ops(), REFERENCE))
    assert_near(linear(x, residual), twin(x, residual), factor=2)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("sizes", [(2, 1024, 4), (4, 512, 4), (4, 256, 2), (8, 512, 4), (8, 256, 2)])
def test_all_sizes_of_programs(sizes: tuple[int, int, int], activation: Activation | None, num_rows: int) -> None:
    """Those of large weights too, on a small one."""
    ops, dtype = make_ops(), torch.bfloat16
    weight, x = randn(48, 2048, dtype=dtype) / 32, randn(num_rows, 2048, dtype=dtype, seed=2)
    residual = randn(num_rows, 48, dtype=dtype, seed=3) if activation is None else None
    found = multiply(x, weight, None, residual, activation, FewRowsTile(*sizes), ops.device)
    expected = REFERENCE.pack_linear(weight, gate=activation)(x, residual)
    assert_near(found, expected, factor=2)


def test_a_number_that_is_not_finite_stays_in_its_row_and_column() -> None:
    weight, x = randn(16, 128, dtype=torch.bfloat16), randn(2, 128, dtype=torch.bfloat16, seed=1)
    weight[5, 100], x[1, 7] = float("nan"), float("inf")
    found = make_ops().pack_linear(weight)(x)
    wrong = found.isfinite().logical_not()
    assert wrong[1].all()
    assert wrong[:, 5].all()
    assert wrong.sum() == 2 + 16 - 1


def test_tiles() -> None:
    """Weights that no tile fits, and those that are not of 16 bits or begin anywhere, are left to torch."""
    tiles = {
        (1, 6144, 4096, False): (8, 512, 4),
        (1, 4096, 14336, False): (4, 512, 4),
        (1, 14336, 4096, True): (2, 1024, 4),
        (1, 1024, 3072, False): (4, 1024, 4),
        (1, 14336, 640, True): (4, 128, 4),
        (2, 6144, 4096, False): (8, 256, 2),
        (2, 14336, 4096, True): (4, 256, 2),
        (3, 6144, 4096, False): None,
        (1, 6144, 96, False): None,
        (1, 6, 128, False): None,
    }
    for shape, sizes in tiles.items():
        assert FewRowsTile.of(*shape) == sizes
    whole = torch.empty(64 * 256 + 1, dtype=torch.bfloat16)
    assert is_readable(whole[:-1].view(64, 256))
    assert not is_readable(whole[1:].view(64, 256))
    assert not is_readable(whole[:-1].view(64, 256).float())
