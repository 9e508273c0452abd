"""A description of a checkpoint's content, and of its form when it is served, from headers only."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from quire.errors import CheckpointError, ConfigError, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.vision_files import find_vision
from quire.models.families.quantization_config import without_quantization
from quire.models.families.vision_towers import build_vision
from quire.models.gguf.block_types import BLOCK_TYPES
from quire.models.gguf.tensor_types import TENSOR_TYPES
from quire.models.hosted.choice import read_model
from quire.models.loading.sizes import check_sizes
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.stored_quantization import StoredQuantization, read_quantization
from quire.models.tensors.stored_tensor import StoredTensor

# Suffix of the codes of stacked experts, in place of ".weight".
STACKED = "_blocks"
FORMS = {kind.name: BLOCK_TYPES[kind.id].form for kind in TENSOR_TYPES.values() if kind.id in BLOCK_TYPES}


@dataclass(frozen=True, slots=True)
class TypeUse:
    """The tensors of one type.

    Args:
        type: name of the type.
        num_tensors: number of tensors.
        num_values: number of their values.
        num_bytes: number of their bytes in files.
        served: description of their form when they are served.
    """

    type: str
    num_tensors: int
    num_values: int
    num_bytes: int
    served: str


@dataclass(frozen=True, slots=True)
class EncoderInspection:
    """The vision encoder of a checkpoint.

    Args:
        path: its GGUF file; "" if it is in the files of the model.
        num_layers, width: sizes of the encoder; 0 if it would be refused.
        patch_size: side of a patch, in pixels.
        num_values: number of values of its tensors.
        num_bytes: number of their bytes in files.
        problem: reason why images would be refused; "" if they would be read.
    """

    path: str = ""
    num_layers: int = 0
    width: int = 0
    patch_size: int = 0
    num_values: int = 0
    num_bytes: int = 0
    problem: str = ""


def inspect_encoder(checkpoint: Checkpoint, mmproj: str | None = None) -> EncoderInspection | None:
    """Describe the vision encoder of a checkpoint from headers; None without one. For `mmproj`, see `ModelConfig`."""
    try:
        files = find_vision(checkpoint, mmproj)
        built = None if files is None else build_vision(without_quantization(files.config), files.tensors)
        if files is None or built is None:
            return None
        spec, names = built
        check_sizes(spec, files.tensors)
        missing = next((each for parts in names.values() for each in parts if each not in files.tensors), None)
        if missing is not None:
            raise CheckpointError(f"the checkpoint in {files.folder} has no tensor {shown(missing)}")
    except ConfigError as error:
        return EncoderInspection(problem=str(error))
    tensors = [files.tensors[each] for parts in names.values() for each in parts]
    return EncoderInspection(
        "" if files is checkpoint else str(files.gguf_path),
        len(spec.layers),
        spec.width,
        spec.patch_shape[-1],
        sum(prod(tensor.shape) for tensor in tensors),
        sum(tensor.num_bytes for tensor in tensors),
    )


@dataclass(frozen=True, slots=True)
class Inspection:
    """The content of a checkpoint.

    Args:
        format: "GGUF" or "safetensors", with the method of quantisation.
        architecture: name of the model's family.
        num_layers, width, vocab_size, max_position: sizes of the model; 0 if no family reads it.
        types: use of each type, in quantised layers and in others, the most bytes first.
        metadata: fields of a GGUF file, with lengths in place of arrays.
        problem: reason why the checkpoint would be refused; "" if it would be served.
        model_impl: implementation that would compute the model: "native" or "transformers"; "" if it would be refused.
        notes: differences of transformers' modules from a family.
        encoder: the vision encoder; None without one.
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
    model_impl: str = ""
    notes: tuple[str, ...] = ()
    encoder: EncoderInspection | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(use.num_bytes for use in self.types)


def inspect(checkpoint: Checkpoint, model_impl: str = "auto", mmproj: str | None = None) -> Inspection:
    """Describe a checkpoint from its headers, without reading weights; for the options, see `ModelConfig`."""
    kind, problem = "safetensors" if checkpoint.gguf_fields is None else "GGUF", ""
    num_layers = width = vocab_size = max_position = 0
    implementation = ""
    notes: tuple[str, ...] = ()
    quantized: set[str] = set()
    try:
        quantization = read_quantization(checkpoint.config, checkpoint.tensors)
        if quantization is not None:
            kind += f", {type(quantization).__name__}"
            quantized = _quantized_tensors(quantization, checkpoint)
        spec = read_model(checkpoint.config, model_impl)
        width, vocab_size, max_position = spec.width, spec.vocab_size, spec.max_position
        if isinstance(spec, HostedSpec):
            implementation, num_layers, notes = "transformers", spec.num_layers, spec.notes
        else:
            implementation, num_layers = "native", len(spec.layers)
    except ConfigError as error:
        problem = str(error)
    names = checkpoint.config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "unknown"
    metadata = {
        key: f"{len(value)} values" if isinstance(value, list) else value
        for key, value in (checkpoint.gguf_fields or {}).items()
    }
    return Inspection(
        kind,
        architecture,
        num_layers,
        width,
        vocab_size,
        max_position,
        _types(checkpoint, quantized),
        metadata,
        problem,
        implementation,
        notes,
        inspect_encoder(checkpoint, mmproj),
    )


def _quantized_tensors(quantization: StoredQuantization, checkpoint: Checkpoint) -> set[str]:
    """Return the names of the tensors that store quantised layers: codes, scales, zero points and orders of inputs."""
    layers = {name.rpartition(".")[0] for name in checkpoint.tensors}
    layers |= {name.removesuffix(STACKED) for name in checkpoint.tensors if name.endswith(STACKED)}
    return {layer + suffix for layer in layers for suffix in quantization.suffixes(layer) or ()}


def _types(checkpoint: Checkpoint, quantized: set[str]) -> tuple[TypeUse, ...]:
    tensors: dict[tuple[str, bool], list[StoredTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        tensors.setdefault((tensor.dtype, name in quantized), []).append(tensor)
    uses = []
    for (dtype, is_quantized), group in tensors.items():
        num_values, num_bytes = sum(prod(member.shape) for member in group), sum(member.num_bytes for member in group)
        served = "parts of quantised layers, at the stored values" if is_quantized else _served(dtype)
        uses.append(TypeUse(dtype, len(group), num_values, num_bytes, served))
    return tuple(sorted(uses, key=lambda use: -use.num_bytes))


def _served(name: str) -> str:
    """Describe the form of tensors of a type when they are served."""
    form = FORMS.get(name)
    if form is None:
        return "as they are"
    parts = [f"codes of {form.bits} bits", f"groups of {form.group} inputs", f"{form.scale} scales".replace("_", "-")]
    parts += ["minima"] * form.has_mins + ["a table of levels"] * (form.levels is not None)
    return ", ".join(parts)
