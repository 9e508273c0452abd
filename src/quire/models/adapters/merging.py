"""An adapter that is added into the weights of a model while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import CheckpointError, ConfigError, shown
from quire.models.adapters.expert_layers import ExpertLayers, ExpertSource
from quire.models.adapters.names import module_key
from quire.models.adapters.peft_folder import ModuleShape, PeftAdapter, read_peft
from quire.models.adapters.slots import HEAD
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.tensor_reader import WEIGHT
from quire.models.families.quantization_config import read_quantization_config
from quire.models.modules.weight_slots import WeightSlots
from quire.models.specs.spec import WeightMap


class MergedAdapter:
    """An adapter that changes weights to `W + scale * B A`.

    The sum is computed in float32 from the stored values, and rounded once to the dtype of the model. The loader
    reorders, packs and quantises weights after that.
    """

    def __init__(self, adapter: PeftAdapter, experts: Mapping[str, ExpertSource], folder: Path) -> None:
        self.digest, self._matrices, self._of_experts = adapter
        self._experts, self._folder = experts, folder

    def add_to(self, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight plus the adapter's delta; the weight itself without a delta.

        Args:
            name: name of the weight in the checkpoint.
            weight: [out, in] as stored; for all experts of a layer, [X * out, in] or [X, in, out].
            dtype: dtype of the model.
        """
        if name in self._experts:
            source = self._experts[name]
            of_experts = self._of_experts.get(source.layer.weight, {})
            merged = source.merged(weight, of_experts, dtype)
        else:
            matrices = self._matrices.get(module_key(name.removesuffix(WEIGHT))) if name.endswith(WEIGHT) else None
            if matrices is None:
                return weight
            merged = (weight.float() + matrices.scale * (matrices.b.float() @ matrices.a.float())).to(dtype)
        if merged is None:
            return weight
        if not bool(merged.isfinite().all()):
            raise CheckpointError(
                f"the adapter {self._folder} gives {shown(name)} values that {dtype} cannot represent",
                field="merge_lora",
            )
        return merged


def read_merged(
    folder: Path,
    checkpoint: Checkpoint,
    modules: Mapping[str, ModuleShape],
    experts: ExpertLayers,
    weight_map: WeightMap,
    max_rank: int,
) -> MergedAdapter:
    """Read an adapter for a merge into the weights of a checkpoint."""
    method = _stored_method(checkpoint)
    if method is not None:
        raise ConfigError(
            f"merge_lora needs weights that are stored plain, and those in {checkpoint.folder} are {method}: serve the "
            "adapter beside the model, with enable_lora in place of merge_lora",
            field="merge_lora",
        )
    adapter = read_peft(folder, modules, experts, max_rank)
    return MergedAdapter(adapter, experts.sources(weight_map), folder)


def _stored_method(checkpoint: Checkpoint) -> str | None:
    """Return the quantisation of a checkpoint's weights, in words; None if they are plain."""
    if checkpoint.gguf_fields is not None:
        return "of a GGUF file"
    quantization = read_quantization_config(checkpoint.config)
    return None if quantization is None else f"quantised by {quantization.method}"


def module_shapes(
    slots: WeightSlots, weight_map: WeightMap, row_count: Callable[[str], int]
) -> Mapping[str, ModuleShape]:
    """Return the widths of the modules that take adapters, by `module_key`."""
    shapes = {}
    for name, slot in slots.items():
        if slot.adapted and not name.startswith(HEAD):
            for source in weight_map[name]:
                shapes[module_key(source.removesuffix(WEIGHT))] = ModuleShape(slot.shape[1], row_count(source))
    return shapes
