"""The content of a checkpoint, and how it would be served, from headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from quire.errors import ConfigError
from quire.models.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.gguf.block_types import BLOCK_TYPES
from quire.models.gguf.tensor_types import TENSOR_TYPES
from quire.models.quantization_config import without_quantization
from quire.models.stored_quantization import read_quantization
from quire.models.stored_tensor import StoredTensor

FORMS = {kind.name: BLOCK_TYPES[kind.id].form for kind in TENSOR_TYPES.values() if kind.id in BLOCK_TYPES}


@dataclass(frozen=True, slots=True)
class TypeUse:
    """The tensors of one type.

    Args:
        type: name of the type.
        num_tensors: number of tensors.
        num_values: number of their values.
        num_bytes: number of their bytes in files.
        served: description of how they are served.
    """

    type: str
    num_tensors: int
    num_values: int
    num_bytes: int
    served: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """The content of a checkpoint.

    Args:
        format: "GGUF" or "safetensors", with the method of quantisation.
        architecture: name of the model's family.
        num_layers, width, vocab_size, max_position: sizes of the model; 0 where no family reads it.
        types: use of each type, the most bytes first.
        metadata: fields of a GGUF file; arrays as their lengths.
        problem: reason why the checkpoint would be refused, "" where it would be served.
    """

    format: str
    architecture: str
    num_layers: int
    width: int
    vocab_size: int
    max_position: int
    types: tuple[TypeUse, ...]
    metadata: dict[str, Any]
    problem: str = ""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(use.num_bytes for use in self.types)


def inspect(model: str, revision: str | None = None) -> Inspection:
    """Read the headers of a checkpoint; no weights are read.

    Args:
        model, revision: see `Checkpoint.open`.

    Raises:
        CheckpointError: the files are missing or damaged.
        UnsupportedModel: a GGUF file of an architecture that is not served.
    """
    checkpoint = Checkpoint.open(model, revision)
    kind, problem = "safetensors" if checkpoint.gguf_fields is None else "GGUF", ""
    num_layers = width = vocab_size = max_position = 0
    try:
        quantization = read_quantization(checkpoint.config, checkpoint.tensors)
        if quantization is not None:
            kind += f", {type(quantization).__name__}"
        spec, _ = build(without_quantization(checkpoint.config))
        num_layers, width = len(spec.layers), spec.width
        vocab_size, max_position = spec.vocab_size, spec.max_position
    except ConfigError as error:
        problem = str(error)
    names = checkpoint.config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "unknown"
    metadata = {
        key: f"{len(value)} values" if isinstance(value, list) else value
        for key, value in (checkpoint.gguf_fields or {}).items()
    }
    return Inspection(
        kind, architecture, num_layers, width, vocab_size, max_position, _types(checkpoint), metadata, problem
    )


def _types(checkpoint: Checkpoint) -> tuple[TypeUse, ...]:
    tensors: dict[str, list[StoredTensor]] = {}
    for tensor in checkpoint.tensors.values():
        tensors.setdefault(tensor.dtype, []).append(tensor)
    uses = []
    for name, group in tensors.items():
        num_values, num_bytes = sum(prod(each.shape) for each in group), sum(each.num_bytes for each in group)
        uses.append(TypeUse(name, len(group), num_values, num_bytes, _served(name)))
    return tuple(sorted(uses, key=lambda use: -use.num_bytes))


def _served(name: str) -> str:
    """Describe how tensors of a type are served."""
    form = FORMS.get(name)
    if form is None:
        return "as they are"
    parts = [f"codes of {form.bits} bits", f"groups of {form.group} inputs", f"{form.scale} scales".replace("_", "-")]
    parts += ["minima"] * form.has_mins + ["a table of levels"] * (form.levels is not None)
    return ", ".join(parts)
