"""Quantised safetensors checkpoints, served: the tokens of the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.models.checkpoints.checkpoint import locate

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PROMPTS = ["Once upon a time, a small fox", "Tom", "The old sailor had a boat, and every day he"]
Tensors = dict[str, Tensor]


def is_linear(name: str) -> bool:
    return "_proj.weight" in name


def save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    """Write the bundled model with other tensors and more fields."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((locate("bundled") / name).read_bytes())
    whole = json.loads((locate("bundled") / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(whole))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def groups_of(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Round groups of a weight to codes from 0 to 15 with 8 in the middle; return them and bfloat16 scales."""
    groups = weight.float().unflatten(1, (weight.shape[1] // size, size))  # type: ignore[no-untyped-call]
    scales = (groups.abs().amax(-1) / 7.0).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return codes.flatten(1).long(), scales


def pack(codes: Tensor, dim: int) -> Tensor:
    """Pack eight codes of four bits into each word, the first in the lowest bits."""
    parts = codes.movedim(dim, -1).unflatten(-1, (codes.shape[dim] // 8, 8))  # type: ignore[no-untyped-call]
    words = (parts << (torch.arange(8) * 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).movedim(-1, dim)


def w4a16(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Return the tensors of a layer, and the values that they stand for."""
    codes, scales = groups_of(weight, 32)
    values = (codes - 8).float() * scales.float().repeat_interleave(32, 1)
    shape = torch.tensor(weight.shape)
    return {".weight_packed": pack(codes, 1), ".weight_scale": scales, ".weight_shape": shape}, values


def w8a8(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / 127.0
    codes = (weight.float() / scales).round().to(torch.int8)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales


def gptq(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Groups of 32 inputs, sorted by another order than theirs, as `desc_act` leaves them."""
    num_inputs = weight.shape[1]
    order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
    codes, scales = groups_of(weight[:, order], 32)
    scales = scales.half()
    values, group_idx = torch.empty(weight.shape), torch.empty(num_inputs, dtype=torch.int32)
    values[:, order] = (codes - 8).float() * scales.float().repeat_interleave(32, 1)
    group_idx[order] = torch.arange(num_inputs, dtype=torch.int32) // 32
    own = torch.empty_like(codes)
    own[:, order] = codes
    zeros = torch.full((num_inputs // 32, weight.shape[0]), 7)  # one less than the zero point
    return {".qweight": pack(own.T, 0), ".qzeros": pack(zeros, 1), ".scales": scales.T, ".g_idx": group_idx}, values


COMPRESSED = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
INTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "w4a16": (
        w4a16,
        COMPRESSED
        | {
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
                }
            },
        },
    ),
    "w8a8": (
        w8a8,
        COMPRESSED
        | {
            "format": "int-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": INTS, "input_activations": ROWS}},
        },
    ),
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "desc_act": True,
            "checkpoint_format": "gptq",
        },
    ),
}


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", METHODS)
def test_texts_are_near_those_of_the_values(name: str, kernels: str, tmp_path: Path) -> None:
    """Rows are rounded to int8 besides, so a likely token may lose to another; log probabilities stay near."""
    method, config = METHODS[name]
    stored: Tensors = {}
    plain: Tensors = {}
    for key, tensor in load_file(locate("bundled") / "model.safetensors").items():
        if not is_linear(key):
            stored[key] = plain[key] = tensor
            continue
        parts, values = method(tensor)
        stored |= {key.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
        plain[key] = values
    quantized = save(tmp_path / "quantized", stored, {"quantization_config": config})
    values_of = save(tmp_path / "values", plain, {})
    measured = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found, expected = (
        [
            [next(iter(position.values())).logprob for position in (output.prompt_logprobs or [])[1:] if position]
            for output in llm.generate(PROMPTS, measured, use_tqdm=False)
        ]
        for llm in (
            LLM(str(quantized), num_kv_blocks=64, kernels=kernels, dtype="float32"),
            LLM(str(values_of), num_kv_blocks=64, kernels=kernels, dtype="float32"),
        )
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0.05, atol=0.25)


def test_a_method_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    tensors = load_file(locate("bundled") / "model.safetensors")
    folder = save(tmp_path / "model", tensors, {"quantization_config": {"quant_method": "modelopt"}})
    with pytest.raises(ConfigError, match=r"method 'modelopt'.* not served: its formats of 8-bit") as caught:
        LLM(str(folder), num_kv_blocks=64)
    assert caught.value.field == "quantization_config"


@pytest.mark.parametrize("name", ["compressed-tensors", "awq", "gptq_marlin", "gguf"])
def test_a_method_that_is_asked_for_must_be_that_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    tensors = load_file(locate("bundled") / "model.safetensors")
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    folder = str(save(tmp_path / "model", tensors, {"quantization_config": config}))
    if name == "compressed-tensors":
        LLM(folder, num_kv_blocks=64, quantization=name).close()
        return
    with pytest.raises(ConfigError, match="the checkpoint has weights by the method compressed-tensors") as caught:
        LLM(folder, num_kv_blocks=64, quantization=name)
    assert caught.value.field == "quantization"
