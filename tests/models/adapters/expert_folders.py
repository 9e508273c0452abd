"""Adapters of single experts in both forms of PEFT, and checkpoints with their sums."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.families.quantization_config import without_quantization
from quire.models.specs.spec import experts_of
from tests.models.adapters.folders import PREFIX, random_matrices, write_adapter

# Gate, up and down of an expert.
PARTS = ("gate_proj", "up_proj", "down_proj")
Tensors = Mapping[str, torch.Tensor]


def linear_adapter(model: Path, folder: Path, seed: int = 1, rank: int = 3, std: float = 0.2) -> Path:
    """Write an adapter of the linear layers of each expert of a model, as transformers 4 has them."""
    widths: dict[str, tuple[int, int]] = {}
    spec, weight_map = build(without_quantization(Checkpoint.open(str(model)).config))
    for idx, layer in enumerate(spec.layers):
        experts = experts_of(layer.ffn)
        if experts is not None:
            ours = "ffn" if layer.ffn is experts else "ffn.experts"
            (source, *_) = weight_map[f"layers.{idx}.{ours}.down.weight"]
            base = source.partition(".experts.")[0] if ".experts." in source else source.rsplit(".", 2)[0]
            for number in range(experts.num_experts):
                for part in PARTS:
                    shape = (experts.width, spec.width) if part != "down_proj" else (spec.width, experts.width)
                    widths[f"{base}.experts.{number}.{part}"] = shape
    return write_adapter(folder, random_matrices(widths, rank, seed, std), target_modules=[*PARTS])


def products_of(matrices: Tensors, scale: float = 2.0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the modules of an adapter, and what it adds to the weight of each."""
    for key, a in matrices.items():
        if ".lora_A" in key:
            module = key.removeprefix(PREFIX).partition(".lora_")[0]
            yield module, scale * matrices[key.replace("lora_A", "lora_B")] @ a


def merged_checkpoint(model: Path, adapter: Path, folder: Path, scale: float = 2.0) -> Path:
    """Write a checkpoint whose weights of experts have the products of a `linear_adapter`."""
    shutil.copytree(model, folder)
    (path,) = folder.glob("*.safetensors")
    tensors, matrices = load_file(path), load_file(adapter / "adapter_model.safetensors")
    is_alternating = "gpt_oss" in json.loads((folder / "config.json").read_text())["model_type"]
    names = {name: name.removesuffix(".weight") for name in tensors}
    for module, delta in products_of(matrices, scale):
        base, number, part = module.rsplit(".", 2)
        older = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
        alone = next((name for name in names if names[name] in (module, f"{base}.{number}.{older}")), None)
        if alone is not None:
            tensors[alone] += delta
            continue
        head, is_down = base.removesuffix(".experts"), part == "down_proj"
        endings = ("experts.down_proj", "output_linear") if is_down else ("experts.gate_up_proj", "input_linear")
        (stack,) = (name for name in names if names[name] in [f"{head}.{ending}" for ending in endings])
        _add(tensors[stack][int(number)], delta, part, is_alternating=is_alternating)
    save_file(tensors, path, {"format": "pt"})
    return folder


def _add(weight: torch.Tensor, delta: torch.Tensor, part: str, *, is_alternating: bool) -> None:
    """Add to the weight of one expert, [out, in] or [in, out], where its first projection has all gates first."""
    out_width = len(delta) if part == "down_proj" else 2 * len(delta)
    if weight.shape[0] != out_width or weight.shape[1] != delta.shape[1]:
        weight = weight.T
    assert weight.shape == (out_width, delta.shape[1]), "in and out differ"
    if part == "down_proj":
        weight += delta
    elif is_alternating:
        weight[PARTS.index(part) :: 2] += delta
    else:
        weight.chunk(2)[PARTS.index(part)].add_(delta)
