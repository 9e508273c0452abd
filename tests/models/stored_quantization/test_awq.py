"""Layers of AWQ have the values of their definition."""

from __future__ import annotations

import pytest
import torch

from tests.models.stored_quantization.packers import Files, check_values, pack_awq, random_codes, random_scales, values

N, K = 24, 192


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("older", [True, False])
def test_values(group_size: int, dtype: torch.dtype, older: bool) -> None:
    size = K if group_size < 0 else group_size
    zeros, scales = random_codes(N, -(-K // size), seed=4), random_scales(N, -(-K // size), dtype)
    tensors = {
        ".qweight": pack_awq(random_codes(N, K)),
        ".qzeros": pack_awq(zeros),
        ".scales": scales.t().contiguous(),
    }
    names = ("w_bit", "q_group_size") if older else ("bits", "group_size")
    quantization = {"quant_method": "awq", names[0]: 4, names[1]: group_size, "zero_point": True, "version": "GEMM"}
    files = Files().add("m.up", tensors).add("m.gate", {".weight": torch.ones(4, 4)})
    found = files.weight(quantization | {"modules_to_not_convert": ["gate"]}, "m.up")
    check_values(found, values(random_codes(N, K), zeros, scales, [col // size for col in range(K)]))
    assert found.input_order is None
