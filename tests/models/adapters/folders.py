"""Adapters in folders as PEFT writes them, with random values, and the same merged into a model of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

# (outputs, inputs) of modules by name.
Widths = Mapping[str, tuple[int, int]]
PREFIX = "base_model.model."


def linear_widths(model: torch.nn.Module, *without: str) -> dict[str, tuple[int, int]]:
    """Return the widths [out, in] of the linear layers of a model's layers that take adapters."""
    widths: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if name.endswith(("lm_head", *without)) or ".altup." in name:
            continue
        if isinstance(module, torch.nn.Linear):
            widths[name] = module.out_features, module.in_features
        elif isinstance(module, Conv1D):
            widths[name] = module.nf, module.nx
    return widths


def random_matrices(widths: Widths, rank: int = 4, seed: int = 0, std: float = 0.1) -> dict[str, torch.Tensor]:
    """Return both matrices of each module, by the names of PEFT."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{PREFIX}{module}.lora_{which}.weight": torch.randn(shape, generator=generator) * std
        for module, (out_width, in_width) in widths.items()
        for which, shape in (("A", (rank, in_width)), ("B", (out_width, rank)))
    }


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write an adapter's folder; fields of `config` replace the usual ones."""
    modules = sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors})
    rank = next((len(tensor) for name, tensor in tensors.items() if ".lora_A" in name), 4)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def merge(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
    """Add `scale * B @ A` to the weight of each module; negative takes it away again."""
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if ".lora_A" in name:
            b = tensors[name.replace(".lora_A", ".lora_B")]
            module: Any = modules[name.removeprefix(PREFIX).partition(".lora_")[0]]
            with torch.no_grad():
                product = scale * (b.double() @ a.double()).to(module.weight.dtype)
                module.weight += product.T if isinstance(module, Conv1D) else product


def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits [T, V]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits.float()
