"""Products that are gated where they are made: the bits of the product and the gate one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from quire.config import Quantization
from quire.ops.cpu.native_library import NativeLibrary
from quire.ops.cpu.native_linear import ExactNativeLinear, NativeLinear
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.ops import Activation
from quire.ops.layers.gated import GatedLinear
from tests.ops.backends import CPU_BACKENDS, LIBRARIES, Backend
from tests.ops.world import randn

pytestmark = pytest.mark.pairwise

LEVELS = [pytest.param(level, id=level) for level in LIBRARIES]
ACTIVATIONS = get_args(Activation)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def check(ops: NativeOps, kind: type, dtype: torch.dtype, activation: Activation, width: int, has_bias: bool) -> None:
    """Compare a gated layer of `width` outputs with its parts, on rows that lie apart."""
    weight = randn(2 * width, 96, dtype=dtype) * 0.2
    bias = randn(2 * width, dtype=dtype, seed=1) if has_bias else None
    gated, plain = ops.pack_linear(weight, bias, gate=activation), ops.pack_linear(weight, bias)
    assert type(gated) is kind
    x = randn(40, 99, dtype=dtype, seed=2)[:, :96]
    for num_rows in (1, 5, 16, 40):
        found = gated(x[:num_rows])
        assert found.shape == (num_rows, width)
        assert torch.equal(found, ops.gate(plain(x[:num_rows]), activation))
        residual = randn(num_rows, 2 * width, dtype=dtype, seed=3)
        added = gated(x[:num_rows], residual)
        assert torch.equal(added, ops.gate(plain(x[:num_rows], residual), activation))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_plain_weights(level: str, dtype: torch.dtype, activation: Activation, has_bias: bool) -> None:
    library = NativeLibrary(level, LIBRARIES[level])
    if dtype not in library.packed_types:
        pytest.skip("stock operators multiply weights of this type")
    check(NativeOps(library), ExactNativeLinear, dtype, activation, 160, has_bias)
    check(NativeOps(library), GatedLinear, dtype, activation, 33, has_bias)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_lossless_weights(level: str, activation: Activation, has_bias: bool) -> None:
    library = NativeLibrary(level, LIBRARIES[level])
    if library.lossless is None:
        pytest.skip("this level has no lossless weights")
    ops = NativeOps(library, is_lossless=True)
    check(ops, ExactNativeLinear, torch.bfloat16, activation, 160, has_bias)
    check(ops, GatedLinear, torch.bfloat16, activation, 70, has_bias)
    assert "lossless" in ops.name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("quantization", get_args(Quantization))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_rounded_weights(
    level: str, quantization: Quantization, dtype: torch.dtype, activation: Activation, has_bias: bool
) -> None:
    ops = NativeOps(NativeLibrary(level, LIBRARIES[level]), quantization)
    check(ops, NativeLinear, dtype, activation, 160, has_bias)
    check(ops, GatedLinear, dtype, activation, 35, has_bias)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_gated_layer_is_not_finite_where_its_product_is_not(backend: Backend) -> None:
    weight, x = randn(128, 64, dtype=torch.bfloat16), randn(3, 64, dtype=torch.bfloat16, seed=1)
    x[1, 5] = float("nan")
    found = backend.make().pack_linear(weight, gate="silu")(x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
