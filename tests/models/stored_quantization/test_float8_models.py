"""Models of 8-bit floating-point weights against transformers, on the values that it dequantises them to."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.tensor_reader import TensorReader
from quire.models.loading.loading import load_decoder
from quire.models.tensors.layer_weight import LayerWeight
from tests.models.stored_tensors import stored_tensors
from tests.models.test_conformance import assert_same
from tests.models.tiny import PagedRun, make_tiny, random_tokens, reference_logits

BLOCK = 16, 32
# As vendors leave them: the rows of a recurrent layer that are few, routers and heads of the vocabulary.
EXCLUDED = ("lm_head", "mlp.gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b")
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": list(EXCLUDED)},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", r"re:.*\.gate$"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "config_groups": {
            "g": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK)},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            }
        },
    },
}
SUFFIXES = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round the blocks of a weight to e4m3 by their largest magnitudes; return the codes and the scales."""
    rows, cols = weight.shape[0] // BLOCK[0], weight.shape[1] // BLOCK[1]
    blocks = weight.reshape(rows, BLOCK[0], cols, BLOCK[1])
    scales = blocks.abs().amax((1, 3)) / 448.0
    return (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn), scales


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def is_quantised(name: str, weight: Tensor) -> bool:
    layer = name.removesuffix(".weight")
    is_linear = name.endswith("proj.weight") or "in_proj" in name
    is_whole = weight.dim() == 2 and weight.shape[0] % BLOCK[0] == weight.shape[1] % BLOCK[1] == 0
    return is_linear and is_whole and not layer.endswith(EXCLUDED)


@pytest.mark.parametrize(
    ("name", "method"), [("qwen3", "compressed-tensors"), ("qwen3.5", "fp8"), ("qwen3-moe", "fp8")]
)
def test_logits(name: str, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stored scales of activations and of the cache change nothing, and nothing is said of them."""
    tiny = make_tiny(name)
    plain: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    num_quantised = 0
    for key, weight in stored_tensors(tiny.reference).items():
        plain[key] = stored[key] = weight
        if not is_quantised(key, weight):
            continue
        num_quantised += 1
        stored[key], scales = quantise(weight)
        plain[key] = Fp8Dequantize(None)._dequantize_one(stored[key], scales, torch.float32)
        layer = key.removesuffix(".weight")
        stored |= {f"{layer}.{SUFFIXES[method]}": scales, f"{layer}.input_scale": torch.tensor([0.1])}
        if key.endswith("k_proj.weight"):
            attention = layer.rpartition(".")[0]
            stored |= {f"{attention}.k_scale": torch.tensor([0.2]), f"{attention}.v_scale": torch.tensor([0.3])}
    assert num_quantised >= 2 * len(tiny.decoder.spec.layers)
    config = tiny.config | {"dtype": "float32"}
    theirs = AutoModelForCausalLM.from_pretrained(
        save(tmp_path / "plain", config, plain), attn_implementation="eager"
    ).eval()
    folder = save(tmp_path / "stored", config | {"quantization_config": CONFIGS[method]}, stored)
    with caplog.at_level(logging.WARNING):
        decoder = load_decoder(Checkpoint.open(str(folder)), device="cpu", dtype=torch.float32)
    assert not caplog.records
    token_ids = random_tokens(45)
    run = PagedRun(decoder)
    found = [run.step({0: token_ids[start:end]})[0] for start, end in ((0, 40), (40, 41), (41, 45))]
    expected = reference_logits(theirs, token_ids)
    assert_same(torch.cat(found), expected)
    # Weights that were not rounded give other logits by far more.
    difference = (reference_logits(tiny.reference, token_ids) - expected).abs().max()
    assert difference > 1e-3 * expected.abs().max()


def test_stacked_experts_are_read_by_their_name(tmp_path: Path) -> None:
    codes, scales = zip(
        *(quantise(torch.randn(32, 64, generator=torch.Generator().manual_seed(e))) for e in range(3)), strict=True
    )
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {name: torch.stack(codes), f"{name}_scale_inv": torch.stack(scales), "model.norm.weight": torch.ones(64)}
    reader = TensorReader(Checkpoint.open(str(save(tmp_path / "m", {"quantization_config": CONFIGS["fp8"]}, tensors))))
    assert reader.parts_of(name) == (name, f"{name}_scale_inv")
    assert reader.parts_of("model.norm.weight") == ("model.norm.weight",)
    assert reader.shape(name, "ffn.gate_up") == (96, 64)
    found = reader.read(name)
    assert isinstance(found, LayerWeight)
    wanted = [Fp8Dequantize(None)._dequantize_one(*each, torch.float32) for each in zip(codes, scales, strict=True)]
    assert torch.equal(found.weight.dequantize(), torch.cat(wanted))
