"""Linear layers on rounded weights: every backend against the slow twin, and what the rounding must give."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from quire.config import Quantization
from quire.ops import make_ops
from quire.ops.cpu.native_linear import NativeLinear
from quire.ops.interface.ops import Linear
from quire.ops.interface.weight_formats import FORMS, WeightFormat, weight_format
from quire.ops.pytorch.torch_quantised import TorchQuantisedLinear
from quire.ops.reference.reference_ops import ReferenceOps
from quire.ops.reference.reference_quantised import ReferenceQuantisedLinear
from tests.ops.backends import CPU_BACKENDS, Backend
from tests.ops.world import randn

pytestmark = pytest.mark.pairwise

FORMATS = list(FORMS)
QUANTISED = (NativeLinear, TorchQuantisedLinear, ReferenceQuantisedLinear)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def pack(backend: Backend, name: WeightFormat, weight: Tensor, bias: Tensor | None = None) -> tuple[Linear, Linear]:
    quantization, options = options_of(name)
    linear = backend.make(quantization).pack_linear(weight.clone(), bias, **options)
    return linear, ReferenceOps(quantization).pack_linear(weight, bias, **options)


def options_of(name: WeightFormat) -> tuple[Quantization, dict[str, Any]]:
    """Return the quantization that has a format, and the options of the layers that get it."""
    form = FORMS[name]
    return "int8" if form.bits == 8 else "int4", {"min_bits": form.bits, "max_group": form.group}


def assert_same_numbers(found: Tensor, expected: Tensor) -> None:
    """Compare to the rounding of float32, or to the one rounding of a smaller type.

    In float32 a sum that is off by one would show: it is worth more than the tolerance.
    """
    eps = torch.finfo(found.dtype).eps
    largest = expected.float().nan_to_num().abs().max().item()
    torch.testing.assert_close(found, expected, rtol=eps, atol=max(16 * 2.0**-23 * largest, 1e-30), equal_nan=True)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("width", "num_columns"), [(1120, 130), (512, 64), (32, 1), (96, 17), (77, 20), (5, 3)])
def test_numbers(backend: Backend, name: WeightFormat, width: int, num_columns: int) -> None:
    """Widths past a piece and not of whole groups, columns that do not fill a panel, rows that lie apart, all tiles."""
    weight, bias = randn(num_columns, width) * width**-0.5, randn(num_columns, seed=1)
    linear, twin = pack(backend, name, weight, bias)
    x = randn(200, width + 3, seed=2)[:, :width]
    residual = randn(200, num_columns, seed=3)
    expected = twin(x, residual)
    kept = x.clone(), residual.clone()
    for num_rows in (1, 2, 5, 6, 7, 16, 17, 70, 200):
        assert_same_numbers(linear(x[:num_rows], residual[:num_rows]), expected[:num_rows])
    assert_same_numbers(linear(x[:9]), twin(x[:9]))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_types(backend: Backend, name: WeightFormat, dtype: torch.dtype) -> None:
    weight, bias = (randn(70, 160) / 8).to(dtype), randn(70, seed=1).to(dtype)
    linear, twin = pack(backend, name, weight, bias)
    x, residual = randn(33, 160, seed=2).to(dtype), randn(33, 70, seed=3).to(dtype)
    assert_same_numbers(linear(x, residual), twin(x, residual))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_whole_numbers_are_multiplied_exactly(backend: Backend) -> None:
    """With largest magnitudes of 128 and 127 one is worth one: ties go to the even number, all else is as it was."""
    numbers = torch.randint(-127, 128, (90, 256), generator=torch.Generator().manual_seed(0)).float()
    weight, x = numbers[:40].clone(), numbers[40:].clone()
    weight[:, ::32], x[:, ::32] = -128.0, -127.0
    linear, _ = pack(backend, "int8", weight)
    assert torch.equal(linear(x), x @ weight.T)
    x[:, 1:] = torch.where(torch.arange(1, 256) % 32 == 0, x[:, 1:], x[:, 1:].abs() / 2.0)
    assert torch.equal(linear(x), x.round() @ weight.T)
    extreme = torch.full((3, 8192), 127.0)
    linear, _ = pack(backend, "int8", -extreme)
    torch.testing.assert_close(linear(extreme), torch.full((3, 3), -127.0 * 127.0 * 8192))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_large_value_rounds_its_own_group_only(backend: Backend, name: WeightFormat) -> None:
    """Rows of real models have values of 20 times the others' spread; one scale for a row would lose the others."""
    linear, _ = pack(backend, name, randn(30, 256) / 16.0)
    group = FORMS[name].group
    x, is_beside = randn(40, 256, seed=1), torch.arange(256) // group != 70 // group
    x[:, 70] *= 1000.0
    apart = linear(x * is_beside) + linear(x * ~is_beside)
    torch.testing.assert_close(linear(x), apart, rtol=0.0, atol=1e-6 * apart.abs().max().item())


def extremes(width: int) -> tuple[Tensor, Tensor]:
    """Return a weight and rows with zeros, numbers that are very large and very small, and some that are not finite."""
    weight, x = randn(20, width), randn(8, width, seed=1)
    weight[3], x[0] = 0.0, 0.0
    weight[4], x[1] = 1e30, -1e37
    weight[5, 40], x[2, 5] = math.nan, math.nan
    x[3, 60], x[4] = -math.inf, 1e-35
    weight[6], x[5] = -1e-36, 1e-12
    return weight, x


def assert_extremes(found: Tensor, expected: Tensor) -> None:
    """Check products of `extremes`; both are changed."""
    assert found[2:4].isnan().all()
    assert found[:, 5].isnan().all()
    found[1, 4] = expected[1, 4] = 0.0  # past the range of float32
    for row in range(len(found)):
        assert_same_numbers(found[row], expected[row])
    assert (found[0, :5] == 0.0).all()
    assert (found[5, [3, 6]] == 0.0).all()
    assert found[5, 0] != 0.0


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
def test_zeros_extremes_and_what_is_not_finite(backend: Backend, name: WeightFormat) -> None:
    weight, x = extremes(64)
    linear, twin = pack(backend, name, weight)
    assert_extremes(linear(x), twin(x))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_gets_the_same_bits_in_every_batch(backend: Backend, name: WeightFormat) -> None:
    linear, _ = pack(backend, name, randn(150, 2208))
    if isinstance(linear, TorchQuantisedLinear):
        pytest.skip("stock operators add up in an order of their own")
    x = randn(110, 2208, seed=1)
    together = linear(x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x), together)
    finally:
        torch.set_num_threads(threads)
    for first, last in ((0, 1), (5, 7), (50, 53), (100, 110), (20, 60)):
        assert torch.equal(linear(x[first:last]), together[first:last])


def test_smaller_groups_are_of_the_same_bits() -> None:
    """A largest group never costs bits: formats that have no smaller groups keep theirs."""
    assert [weight_format("int8", bits, 32) for bits in (4, 6, 8)] == ["int8"] * 3
    assert [weight_format("int8", bits, 16) for bits in (4, 6, 8)] == ["int8 of 16"] * 3
    assert [weight_format("int4", bits, 16) for bits in (4, 6, 8)] == ["int4", "int6", "int8 of 16"]
    assert [weight_format(name, 4, 8) for name in ("int8", "int4")] == ["int8 of 16", "int4"]
    assert weight_format(None, 8, 16) is None


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_what_is_rounded(kernels: str) -> None:
    def bits(name: Quantization, width: int, min_bits: int = 4) -> float:
        """Return how many bits a value's error tells of."""
        linear = make_ops(torch.device("cpu"), kernels, name).pack_linear(randn(1, width), min_bits=min_bits)
        if type(linear) not in QUANTISED:
            return 16.0
        error = _error(linear, width)
        return 8.0 if error < 0.01 else 6.0 if error < 0.02 else 4.0

    assert [bits("int8", 64, min_bits) for min_bits in (4, 6, 8)] == [8.0, 8.0, 8.0]
    assert [bits("int4", 64, min_bits) for min_bits in (4, 6, 8)] == [4.0, 6.0, 8.0]
    assert [bits("int4", width) for width in (36, 33)] == [4.0, 4.0]


def _error(linear: Linear, width: int) -> float:
    weight = randn(1, width)
    eye = torch.eye(width)
    return cast("float", ((linear(eye)[:, 0] - weight[0]).abs().max() / weight.abs().max()).item())


@pytest.mark.parametrize("name", get_args(Quantization))
def test_stock_operators_on_another_device(name: Quantization) -> None:
    """On a device without numbers, operators that would mix its tensors with those of the CPU fail."""
    linear = make_ops(torch.device("meta"), "torch", name).pack_linear(randn(70, 96), randn(70, device="meta"))
    assert isinstance(linear, TorchQuantisedLinear)
    found = linear(randn(3, 96, device="meta", dtype=torch.bfloat16), randn(3, 70, device="meta"))
    assert (found.device.type, found.shape, found.dtype) == ("meta", (3, 70), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_stock_operators_on_a_gpu(name: WeightFormat) -> None:
    quantization, options = options_of(name)
    weight, bias, x, residual = randn(130, 512), randn(130, seed=1), randn(70, 512, seed=2), randn(70, 130, seed=3)
    ops = make_ops(torch.device("cuda"), "torch", quantization)
    found = ops.pack_linear(weight.cuda(), bias.cuda(), **options)(x.cuda(), residual.cuda())
    expected = ReferenceOps(quantization).pack_linear(weight, bias, **options)(x, residual)
    assert_same_numbers(found.cpu(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_rounded_weights_are_near_those_that_came(name: WeightFormat) -> None:
    """A step of int8 is 1/128 of a group's largest value, one of int6 a 32nd, one of int4 an eighth.

    The largest of 16 normal values is on average 0.89 times that of 32.
    """
    weight = randn(40, 320)
    _, twin = pack(Backend("cpu", ReferenceOps), name, weight)
    assert isinstance(twin, ReferenceQuantisedLinear)
    error = (twin.dequantised() - weight).square().mean().sqrt() / weight.square().mean().sqrt()
    low, high = {
        "int8 of 16": (0.0043, 0.0051),
        "int8": (0.0052, 0.006),
        "int6": (0.0175, 0.0225),
        "int4": (0.07, 0.09),
    }[name]
    assert low < error < high
