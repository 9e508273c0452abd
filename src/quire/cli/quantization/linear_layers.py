"""The choice of the weights of a checkpoint that are to be quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.errors import ConfigError, UnsupportedModel, shown
from quire.models.specs.spec import WeightMap
from quire.models.stored_quantization.scheme import PLAIN
from quire.models.tensors.stored_tensor import StoredTensor

# The modules of a layer whose weights are quantised. Routers, convolutions and gates of per-layer inputs are small and
# are not quantised, nor are the embedding and the output head.
MODULES: Final = frozenset({"qkv", "q", "output", "gate_up", "down", "input"})


def linear_weights(weight_map: WeightMap, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[str, ...]]:
    """Return the names of the decoder's weights that are to be quantised, with the names of their tensors."""
    weights = {}
    for name, sources in weight_map.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not name.startswith("layers.") or module.rpartition(".")[2] not in MODULES:
            continue
        for source in sources:
            if not source.endswith(".weight") or source not in tensors or len(tensors[source].shape) != 2:
                raise UnsupportedModel(
                    f"tensor {shown(source)} of the checkpoint is no matrix of one layer, which is what is quantised: "
                    "models with their experts in one tensor are not written quantised"
                )
        weights[name] = tuple(dict.fromkeys(sources))
    return weights


def check_groups(tensors: Mapping[str, StoredTensor], names: list[str], group_size: int | None) -> None:
    """Refuse matrices that are already quantised, and a group size that does not divide the inputs of a layer."""
    widths = {name: tensors[name].shape[1] for name in names}
    for name, width in widths.items():
        if tensors[name].dtype not in PLAIN:
            raise ConfigError(
                f"tensor {shown(name)} is stored as {tensors[name].dtype}; {', '.join(PLAIN)} are quantised",
                field="model",
            )
        if width % 16:
            raise ConfigError(f"{shown(name)} has {width} inputs, and multiples of 16 are quantised", field="model")
        if group_size is not None and width % group_size:
            fitting = [str(size) for size in (32, 64, 128) if not any(width % size for width in widths.values())]
            raise ConfigError(
                f"group_size {group_size} does not divide the {width} inputs of {shown(name)}; sizes that divide those "
                f"of all layers: {', '.join(fitting) or 'none of 32, 64 and 128'}",
                field="group_size",
            )
