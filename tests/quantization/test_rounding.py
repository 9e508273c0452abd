"""Codes and scales: rounding, calibration, and their packed form as it is read back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.cli.quantization.compressed_tensors import pack, quantization_config
from quire.cli.quantization.coordinate_descent import quantize
from quire.cli.quantization.rounding import QuantizedMatrix, Scheme, round_to_nearest
from tests.models.stored_quantization.packers import Files

N, K = 24, 256
SCHEMES = [
    *(Scheme(4, size, symmetric, torch.bfloat16) for size in (32, 64, 128) for symmetric in (True, False)),
    Scheme(4, 32, False, torch.float16),
    Scheme(8, None, True, torch.float32),
]


def random_weight(seed: int = 0) -> Tensor:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    weight[3] = 0
    weight[4, :32] = weight[4, :32].abs() + 3  # far from zero
    return weight


def correlated_inputs(num_rows: int = 512) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(num_rows, 40, generator=generator) @ torch.randn(40, K, generator=generator)
    return mixed + torch.randn(num_rows, K, generator=generator)


def calibrated(weight: Tensor, scheme: Scheme, x: Tensor) -> QuantizedMatrix:
    return quantize(weight, x.T @ x, x.T @ x, scheme)


def output_error(weight: Tensor, matrix: QuantizedMatrix, x: Tensor) -> float:
    return float((x @ (weight - matrix.dequantize()).T).square().sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_stored_layers_are_read_back_with_these_values(scheme: Scheme) -> None:
    weight = random_weight()
    matrices = [round_to_nearest(weight, scheme)]
    if scheme.bits == 4:
        matrices.append(calibrated(weight, scheme, correlated_inputs()))
    for matrix in matrices:
        assert int(matrix.codes.max()) < 1 << scheme.bits
        read = Files().add("a", pack(matrix, scheme)).weight(quantization_config(scheme, []))
        torch.testing.assert_close(read.weight.dequantize(), matrix.dequantize(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounded_values_are_within_half_a_step(scheme: Scheme) -> None:
    weight = random_weight()
    matrix = round_to_nearest(weight, scheme)
    steps = matrix.factors.scales.float().repeat_interleave(K // matrix.factors.scales.shape[1], 1)
    # The scale is rounded as well, by a share of up to 1 / 256, and a symmetric range ends half a step early.
    most = 0.5 * steps + 0.02 * weight.abs() + 1e-6
    assert ((matrix.dequantize() - weight).abs() <= most * (1 if scheme.symmetric else 2)).all()
    assert (matrix.dequantize()[3] == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_calibration_changes_outputs_less_than_half_as_much(symmetric: bool) -> None:
    weight, scheme, x = random_weight(), Scheme(4, 32, symmetric, torch.bfloat16), correlated_inputs()
    nearest, best = round_to_nearest(weight, scheme), calibrated(weight, scheme, x)
    assert output_error(weight, best, x) < 0.5 * output_error(weight, nearest, x)


def test_calibrated_codes_have_no_better_neighbour() -> None:
    # Against the error computed in full, for each code of some rows and both of its neighbours.
    weight, scheme, x = random_weight()[:3, :64], Scheme(4, 32, True, torch.float32), correlated_inputs()[:, :64]
    x = torch.cat([x, torch.eye(64) * (0.01 * x.square().sum(0).mean()).sqrt()])  # the damping
    matrix = quantize(weight, x[:512].T @ x[:512], x[:512].T @ x[:512], scheme)
    errors = [output_error(weight, matrix, x)]
    for row, column in torch.cartesian_prod(torch.arange(3), torch.arange(64)).tolist():
        for code in {max(0, int(matrix.codes[row, column]) - 1), min(15, int(matrix.codes[row, column]) + 1)}:
            codes = matrix.codes.clone()
            codes[row, column] = code
            errors.append(output_error(weight, matrix._replace(codes=codes), x))
    assert min(errors) > 0.999 * errors[0]


def test_inputs_of_the_quantised_model_are_made_up_for() -> None:
    # The quantised model gives the layer inputs that are all 10 % too small.
    weight, scheme, x = random_weight(), Scheme(4, 32, True, torch.bfloat16), correlated_inputs()
    seen = 0.9 * x
    matrix = quantize(weight, seen.T @ seen, x.T @ seen, scheme)
    error = (x @ weight.T - seen @ matrix.dequantize().T).square().mean()
    assert error < 0.02 * (x @ weight.T).square().mean()
    assert error < 0.5 * (x @ weight.T - seen @ calibrated(weight, scheme, x).dequantize().T).square().mean()


def test_a_layer_without_inputs_is_rounded() -> None:
    weight, scheme = random_weight(), Scheme(4, 32, True, torch.bfloat16)
    matrix = quantize(weight, torch.zeros(K, K), torch.zeros(K, K), scheme)
    error = (matrix.dequantize() - weight).square().mean()
    assert error <= (round_to_nearest(weight, scheme).dequantize() - weight).square().mean()
