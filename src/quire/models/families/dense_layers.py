"""Dense layers that sentence-transformers applies to pooled states, from a field of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from quire.models.families.hf_config import HFConfig
from quire.models.specs.pooled_spec import Dense
from quire.models.specs.spec import WeightMap

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface.ops import Elementwise

# Field that is added to the configuration of a checkpoint with dense layers: an object of their configurations by the
# folder of each, in order, whose name is the prefix of its tensors.
DENSE: Final = "quire_dense"
# Name of an activation's class in torch -> Quire's name; None for no activation.
ACTIVATIONS: Final[Mapping[str, Elementwise | None]] = {
    "GELU": "gelu",
    "Identity": None,
    "ReLU": "relu",
    "SiLU": "silu",
    "Tanh": "tanh",
}


def activation_name(path: str) -> str:
    """Return the name of a class from its path: "torch.nn.modules.activation.Tanh"."""
    return path.rpartition(".")[2]


def read_dense(config: HFConfig) -> tuple[tuple[Dense, ...], WeightMap]:
    """Return the dense layers of a checkpoint, and the names of their weights; none for most checkpoints."""
    layers: list[Dense] = []
    names: WeightMap = {}
    for idx, (path, part) in enumerate((config.parts(DENSE) or {}).items()):
        activation = ACTIVATIONS[activation_name(part.text("activation_function", "Tanh"))]
        layers.append(Dense(part.integer("out_features"), part.flag("bias", True), activation))
        kinds = ("weight", "bias") if layers[-1].bias else ("weight",)
        names |= {f"dense.{idx}.{kind}": (f"{path}.linear.{kind}",) for kind in kinds}
    return tuple(layers), names
