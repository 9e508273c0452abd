"""Experts in layers of Llama's layout: their fields and the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from quire.errors import CheckpointError
from quire.models.families.hf_config import HFConfig
from quire.models.specs.spec import Experts, ModelSpec, WeightMap

# Limit for all layers together, since names are made for all experts before a tensor is read; published models have
# 25,000.
MAX_EXPERTS = 2**18
# Names of the gate, up and down of each expert.
PARTS = ("gate_proj", "up_proj", "down_proj")
# Field that is added to the configuration of files that store each expert's linear layers by name, for families that
# may store all experts of a layer in one tensor.
LINEAR_EXPERTS: Final = "experts_are_linear_layers"
# Field that is added to the configuration of files that store all experts of a layer in blocks of MXFP4, not transposed
# as the family's other files.
BLOCK_EXPERTS: Final = "experts_are_blocks"

# Field that is added to the configuration of files that store all experts of a layer in one tensor [X, out, in].
ROW_EXPERTS: Final = "experts_are_rows"


def read_counts(config: HFConfig, default: int | None = None, chosen: int | None = None) -> tuple[int, int]:
    """Return the number of experts, and the number of experts per token."""
    name = "num_experts" if config.has("num_experts") else "num_local_experts"
    num_experts, num_chosen = config.integer(name, default), config.integer("num_experts_per_tok", chosen)
    if num_chosen > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok must be at most {name} ({num_experts}), got {num_chosen}",
            field="num_experts_per_tok",
        )
    num_layers = config.integer("num_hidden_layers")
    if num_layers * num_experts > MAX_EXPERTS:
        raise CheckpointError(
            f"config.json: num_hidden_layers ({num_layers}) times {name} ({num_experts}) must be at most {MAX_EXPERTS}",
            field=name,
        )
    return num_experts, num_chosen


def has_linear_experts(names: Iterable[str]) -> bool:
    """Return whether tensors of these names hold experts as linear layers."""
    return any(".experts.0." in name for name in names)


def has_block_experts(names: Iterable[str]) -> bool:
    """Return whether tensors of these names hold the experts of a layer in blocks of MXFP4."""
    return any(name.endswith(".experts.gate_up_proj_blocks") for name in names)


def has_row_experts(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether tensors of these shapes hold all experts of a layer as [X, out, in], not as [X, in, out]."""
    gate_up, down = "gate_up_proj", "down_proj"
    stacks = (name for name, shape in shapes.items() if name.endswith(f".experts.{gate_up}") and len(shape) == 3)
    name = next(stacks, "")
    of_down = shapes.get(name.removesuffix(gate_up) + down, ())
    return len(of_down) == 3 and shapes[name][1] == 2 * of_down[2]


def with_experts(
    read: tuple[ModelSpec, WeightMap],
    experts: Experts,
    layers: Collection[int],
    module: str,
    parts: tuple[str, str, str] = PARTS,
    *,
    prefix: str = "model",
    is_stacked: bool = False,
) -> tuple[ModelSpec, WeightMap]:
    """Replace the gated MLPs of some layers by experts."""
    spec, names = read
    specs = [replace(layer, ffn=experts) if idx in layers else layer for idx, layer in enumerate(spec.layers)]
    replaced = {("layers", str(idx), "ffn") for idx in layers}
    names = {name: sources for name, sources in names.items() if tuple(name.split(".")[:3]) not in replaced}
    for idx in layers:
        ours, theirs = f"layers.{idx}.ffn", f"{prefix}.layers.{idx}.{module}"
        names[f"{ours}.router.weight"] = (f"{theirs}.gate.weight",)
        names |= map_stack(ours, theirs) if is_stacked else map_experts(ours, theirs, experts.num_experts, parts)
    return replace(spec, layers=tuple(specs)), names


def map_experts(
    ours: str, theirs: str, num_experts: int, parts: tuple[str, str, str] = PARTS, kind: str = "weight"
) -> WeightMap:
    """Name the tensors of experts that are stored one by one."""
    gate, up, down = parts
    numbered = [f"{theirs}.experts.{number}" for number in range(num_experts)]
    return {
        f"{ours}.gate_up.{kind}": tuple(f"{expert}.{part}.{kind}" for expert in numbered for part in (gate, up)),
        f"{ours}.down.{kind}": tuple(f"{expert}.{down}.{kind}" for expert in numbered),
    }


def map_stack(ours: str, theirs: str) -> WeightMap:
    """Name the tensors of experts that are stored in one tensor [X, out, in], which is read as [X * out, in]."""
    return {f"{ours}.{name}.weight": (f"{theirs}.experts.{name}_proj",) for name in ("gate_up", "down")}
