"""Layers of 8-bit floating-point codes have the values of their definition, in every layout of their scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.errors import UnsupportedModel
from quire.models.stored_quantization import read_quantization
from tests.models.stored_quantization.packers import Files, check_values, random_scales

N, K = 20, 192
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 64]}


def value_of(code: int) -> float:
    """Return the number of a code of e4m3: a sign, four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if code & 128 else magnitude


def random_float8(*shape: int, seed: int = 0) -> Tensor:
    codes = torch.randint(0, 254, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return (codes + (codes >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)


def float8_values(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return code * scale in float32, for codes [N, K] and scales [N / block, K / block]."""
    numbers = np.zeros(codes.shape, np.float32)
    factors = scales.float().numpy()
    for (row, col), code in np.ndenumerate(codes.view(torch.uint8).numpy()):
        numbers[row, col] = np.float32(value_of(int(code))) * factors[row // block[0], col // block[1]]
    return torch.from_numpy(numbers)


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} | weights
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block", "group"), [((8, 64), 32), ((128, 128), 32), ((3, 16), 16), ((1, 1000), 32)])
def test_blocks(block: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    """Blocks that do not divide the weight, and larger ones than it is."""
    shape = -(-N // block[0]), -(-K // block[1])
    codes, scales = random_float8(N, K), random_scales(*shape, dtype=dtype)
    files = Files().add("a", {".weight": codes, ".weight_scale_inv": scales})
    found = files.weight(FP8 | {"weight_block_size": list(block)})
    check_values(found, float8_values(codes, scales, block))
    assert found.weight.form.group == group


def test_blocks_of_128_inputs_keep_one_scale() -> None:
    codes, scales = random_float8(130, 384), random_scales(2, 3, torch.float32)
    files = Files().add("a", {".weight": codes, ".weight_scale_inv": scales})
    found = files.weight(FP8 | {"weight_block_size": [128, 128]})
    assert found.weight.form.group == 128
    check_values(found, float8_values(codes, scales, (128, 128)))


def test_scales_that_are_powers_of_two() -> None:
    exponents = torch.tensor([[0, 127, 240], [1, 120, 130], [126, 128, 3]], dtype=torch.uint8)
    codes, powers = random_float8(N, K), torch.tensor(2.0) ** (exponents.float() - 127)
    found = Files().add("a", {".weight": codes, ".weight_scale_inv": exponents}).weight(FP8 | {"scale_fmt": "ue8m0"})
    check_values(found, float8_values(codes, powers, (8, 64)))


@pytest.mark.parametrize("name", [".weight_scale", ".weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (N,), (N, 1)])
def test_one_scale_and_one_for_each_output(name: str, shape: tuple[int, ...]) -> None:
    codes, scales = random_float8(N, K), random_scales(N, 1, torch.float32)
    if N not in shape:
        scales = scales[:1]
    tensors = {".weight": codes, name: scales.reshape(shape), ".input_scale": torch.tensor(0.5)}
    found = Files().add("a", tensors).weight({"quant_method": "fp8", "activation_scheme": "static"})
    check_values(found, float8_values(codes, scales, (N // len(scales), K)))


@pytest.mark.parametrize(
    ("strategy", "block", "shape"),
    [("tensor", (N, K), (1,)), ("channel", (1, K), (N, 1)), ("group", (1, 64), (N, 3)), ("block", (8, 64), (3, 3))],
)
@pytest.mark.parametrize("layout", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("is_static", [True, False])
def test_compressed_tensors(
    strategy: str, block: tuple[int, int], shape: tuple[int, ...], layout: str, is_static: bool
) -> None:
    config = compressed(strategy, group_size=64 if strategy == "group" else None, block_structure=[8, 64])
    config["format"] = layout
    config["config_groups"]["g"]["input_activations"] |= {"dynamic": not is_static, "strategy": "tensor"}
    codes, scales = random_float8(N, K), random_scales(N, 3, torch.bfloat16)[: shape[0], : shape[-1]].reshape(shape)
    tensors = {".weight": codes, ".weight_scale": scales, ".input_scale": torch.tensor([0.5])}
    found = Files().add("a", tensors).weight(config)
    check_values(found, float8_values(codes, scales.reshape(shape if len(shape) == 2 else (1, 1)), block))


@pytest.mark.parametrize("block", [[8, 64], None])
def test_stacked_experts_follow_each_other_in_the_rows(block: list[int] | None) -> None:
    layer, num_experts = "m.experts.gate_up_proj", 3
    codes = random_float8(num_experts, N, K)
    scales = random_scales(num_experts * 3, 3, torch.float32).view(num_experts, 3, 3)
    if block is None:
        scales = scales[:, :1, :1].contiguous()
    files = Files().add(layer, {"": codes, "_scale_inv": scales})
    found = files.weight(FP8 | {"weight_block_size": block}, layer)
    sizes = (8, 64) if block else (N, K)
    check_values(found, torch.cat([float8_values(*each, sizes) for each in zip(codes, scales, strict=True)]))


@pytest.mark.parametrize("num_inputs", [8, 40])
def test_inputs_that_groups_do_not_divide_are_refused(num_inputs: int) -> None:
    tensors = {".weight": random_float8(N, num_inputs), ".weight_scale": torch.ones(1)}
    with pytest.raises(UnsupportedModel, match=f"layer 'a' .*it has {num_inputs} inputs"):
        Files().add("a", tensors).weight({"quant_method": "fp8"})


def test_exceptions_are_names_of_whole_parts() -> None:
    files = Files().add("m.0.gate_proj", {".weight": random_float8(N, K), ".weight_scale_inv": torch.ones(3, 3)})
    files.add("m.0.gate", {".weight": torch.ones(4, 4)}).add("lm_head", {".weight": torch.ones(4, 4)})
    found = read_quantization(FP8_CONFIG, files.headers())
    assert found is not None
    assert found.suffixes("m.0.gate_proj") == (".weight", ".weight_scale_inv")
    assert found.suffixes("m.0.gate") is None
    assert found.suffixes("lm_head") is None


FP8_CONFIG = {"quantization_config": FP8 | {"modules_to_not_convert": ["m.0.gate", "lm_head"]}}
