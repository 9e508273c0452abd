"""Stacked experts of gpt-oss have the values of their definition."""

from __future__ import annotations

import torch

from quire.models.stored_quantization import read_quantization
from tests.models.stored_quantization.packers import Files, check_values, fp4_values, pack_fp4, random_codes

E, N, K = 3, 8, 96
LAYER = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def test_experts_follow_each_other_in_the_rows() -> None:
    codes, exponents = random_codes(E * N, K), random_codes(E * N, K // 32, 7, seed=3)
    files = Files().add(
        LAYER,
        {
            "_blocks": pack_fp4(codes).view(E, N, K // 32, 16),
            "_scales": torch.from_numpy(exponents).to(torch.uint8).view(E, N, K // 32),
        },
    )
    found = files.weight(CONFIG, LAYER)
    wanted = fp4_values(codes, exponents)
    check_values(found, wanted)
    # The gate's rows of an expert are its even rows.
    assert torch.equal(found.weight.rows(slice(N, 2 * N, 2)).dequantize(), wanted[N : 2 * N : 2])


def test_layers_without_blocks_are_plain() -> None:
    files = Files().add("lm_head", {".weight": torch.ones(4, 4)})
    found = read_quantization({"quantization_config": CONFIG}, files.headers())
    assert found.suffixes("lm_head") is None
    assert found.suffixes(LAYER) is None
