"""Layers of compressed-tensors have the values of their definition, and the scheme of their group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.models.stored_quantization import read_quantization
from tests.models.stored_quantization.packers import (
    Files,
    check_values,
    fp4_values,
    pack_columns,
    pack_fp4,
    pack_rows,
    random_codes,
    random_scales,
    values,
)

N, K = 20, 192


def config(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True} | weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def packed(bits: int = 4, group_size: int = 32, *, seed: int = 0, n: int = N, k: int = K) -> dict[str, torch.Tensor]:
    return {
        ".weight_packed": pack_rows(random_codes(n, k, bits, seed), bits),
        ".weight_scale": random_scales(n, -(-k // group_size)),
        ".weight_shape": torch.tensor([n, k]),
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, -1])
def test_packed_symmetric_layers(bits: int, group_size: int) -> None:
    # Groups of 128 leave one of 64 inputs behind.
    size = K if group_size < 0 else group_size
    tensors = packed(bits, size)
    strategy = "channel" if group_size < 0 else "group"
    found = Files().add("a", tensors).weight(config(num_bits=bits, group_size=group_size, strategy=strategy))
    groups = [col // size for col in range(K)]
    zero = 1 << (bits - 1)
    check_values(found, values(random_codes(N, K, bits), zero, tensors[".weight_scale"], groups))
    assert found.weight.form.group == (16 if group_size == 16 else 32)
    assert not found.weight.form.has_zero_points


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_packed_asymmetric_layers(bits: int, group_size: int) -> None:
    size = K if group_size < 0 else group_size
    zeros = random_codes(N, K // size, bits, seed=5)
    tensors = packed(bits, size) | {".weight_zero_point": pack_columns(zeros, bits)}
    found = Files().add("a", tensors).weight(config(num_bits=bits, group_size=group_size, symmetric=False))
    groups = [col // size for col in range(K)]
    check_values(found, values(random_codes(N, K, bits), zeros, tensors[".weight_scale"], groups))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_keep_their_dtype(dtype: torch.dtype) -> None:
    tensors = packed() | {".weight_scale": random_scales(N, K // 32, dtype)}
    found = Files().add("a", tensors).weight(config(group_size=32))
    check_values(found, values(random_codes(N, K), 8, tensors[".weight_scale"], [col // 32 for col in range(K)]))


def test_inputs_of_old_files_are_sorted_by_group() -> None:
    groups = [(col * 7) % 6 for col in range(K)]
    tensors = packed() | {".weight_g_idx": torch.tensor(groups, dtype=torch.int32)}
    found = Files().add("a", tensors).weight(config(group_size=32, actorder="group"))
    assert found.input_order is not None
    check_values(found, values(random_codes(N, K), 8, tensors[".weight_scale"], groups))


@pytest.mark.parametrize("groups", [[-1] * K, [col // 32 for col in range(K)]])
def test_an_order_that_changes_nothing_is_left_out(groups: list[int]) -> None:
    tensors = packed() | {".weight_g_idx": torch.tensor(groups, dtype=torch.int32)}
    found = Files().add("a", tensors).weight(config(group_size=32))
    assert found.input_order is None
    check_values(found, values(random_codes(N, K), 8, tensors[".weight_scale"], [col // 32 for col in range(K)]))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [64, -1])
@pytest.mark.parametrize("activations", ["dynamic", "static", "asymmetric"])
def test_integers(symmetric: bool, group_size: int, activations: str) -> None:
    size = K if group_size < 0 else group_size
    codes, zeros = random_codes(N, K, 8) - 128, random_codes(N, K // size, 8, seed=5) - 128
    scales = random_scales(N, K // size, torch.bfloat16)
    tensors = {".weight": torch.from_numpy(codes).to(torch.int8), ".weight_scale": scales}
    if not symmetric:
        tensors[".weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
    quantization = config("int-quantized", num_bits=8, group_size=group_size, symmetric=symmetric)
    quantization["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "int", "dynamic": activations == "dynamic", "symmetric": activations != "asymmetric",
        "strategy": "token" if activations == "dynamic" else "tensor",
    }  # fmt: skip
    if activations != "dynamic":  # not read: rows are rounded by their own largest magnitude
        tensors |= {".input_scale": torch.tensor([0.01]), ".input_zero_point": torch.tensor([3], dtype=torch.int8)}
    found = Files().add("a", tensors).weight(quantization)
    groups = [col // size for col in range(K)]
    check_values(found, values(codes, 0 if symmetric else zeros, scales, groups))


def test_mxfp4() -> None:
    codes, exponents = random_codes(N, K), random_codes(N, K // 32, 8, seed=3)
    # The ends: the halved scale 2 ** -128 is subnormal, and beyond 252 the largest value is infinite.
    exponents = exponents.clip(0, 252)
    exponents[0] = [0, 1, 2, 251, 252, 127]
    tensors = {".weight_packed": pack_fp4(codes), ".weight_scale": torch.from_numpy(exponents).to(torch.uint8)}
    found = Files().add("a", tensors).weight(config("mxfp4-pack-quantized", type="float", group_size=32))
    check_values(found, fp4_values(codes, exponents))


def test_groups_have_schemes_of_their_own() -> None:
    quantization = config(group_size=32)
    quantization["config_groups"] = {
        "all": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}},
        "by_name": {"targets": ["m.0.down"], "weights": {"num_bits": 8, "group_size": 64}},
        "by_pattern": {"targets": [r"re:.*\.down"], "weights": {"num_bits": 8}},
        "late": {"targets": [r"re:.*\.down"], "weights": {"num_bits": 4}},
        "own": {
            "targets": ["re:m.*[.]head$"],
            "format": "mxfp4-pack-quantized",
            "weights": {"num_bits": 4, "type": "float", "group_size": 32},
        },
    }
    quantization["format"] = "pack-quantized"
    files = Files()
    wanted = {"m.0.up": (4, 32), "m.0.down": (8, 64), "m.1.down": (8, K)}
    for layer, (bits, size) in wanted.items():
        files.add(layer, packed(bits, size))
    exponents = random_codes(N, K // 32, 5)
    files.add(
        "m.head",
        {".weight_packed": pack_fp4(random_codes(N, K)), ".weight_scale": torch.from_numpy(exponents).to(torch.uint8)},
    )
    for layer, (bits, size) in wanted.items():
        scales = files.tensors[f"{layer}.weight_scale"]
        groups = [col // size for col in range(K)]
        check_values(
            files.weight(quantization, layer), values(random_codes(N, K, bits), 1 << (bits - 1), scales, groups)
        )
    check_values(files.weight(quantization, "m.head"), fp4_values(random_codes(N, K), exponents))


def test_plain_layers_have_no_suffixes() -> None:
    files = Files().add("a", packed()).add("lm_head", {".weight": torch.ones(4, 4)})
    found = read_quantization({"compression_config": config()}, files.headers())
    assert found.suffixes("lm_head") is None
    assert found.suffixes("a") == (".weight_packed", ".weight_scale", ".weight_shape")


def test_rows_are_unpacked_when_they_are_read() -> None:
    tensors = packed()
    found = Files().add("a", tensors).weight(config(group_size=32))
    before = found.weight.dequantize(slice(0, 1))
    tensors[".weight_packed"][1:] = 0
    assert torch.equal(found.weight.dequantize(slice(0, 1)), before)
    assert not found.weight.read(slice(1, None)).codes.any()
