"""The architectures of GGUF files: their configuration and tensors in the terms of Quire's families.

An architecture is a row of `ARCHITECTURES`: a function that writes a `config.json`, a table of tensor names, and the
changes of weights by the converter (another order of rows, one added to norms), which readers undo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.errors import UnsupportedModel, shown
from quire.models.families import build
from quire.models.gguf.architectures.fused_qkv import find_ranges, with_parts
from quire.models.gguf.architectures.gemma import GEMMA
from quire.models.gguf.architectures.glm4 import GLM
from quire.models.gguf.architectures.gpt2 import GPT2
from quire.models.gguf.architectures.gpt_oss import GPT_OSS
from quire.models.gguf.architectures.image_models import as_whole_model, in_language_model
from quire.models.gguf.architectures.lfm2 import LFM2
from quire.models.gguf.architectures.llama4 import LLAMA4
from quire.models.gguf.architectures.llama_layout import LLAMA_LAYOUT
from quire.models.gguf.architectures.mamba import MAMBA_LAYOUT
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.nemotron_h import NEMOTRON_H
from quire.models.gguf.architectures.phi3 import PHI3
from quire.models.gguf.architectures.qwen3_5 import QWEN3_5
from quire.models.gguf.architectures.sources import Architecture, AxisSwap, Config, Floats, TensorSource, find_sources

__all__ = ["ARCHITECTURES", "AxisSwap", "TensorSource", "read_architecture"]

# Value of `general.architecture` -> reader of such files.
ARCHITECTURES: Final[dict[str, Architecture]] = {
    **LLAMA_LAYOUT,
    **LLAMA4,
    **QWEN3_5,
    **GEMMA,
    **GLM,
    **LFM2,
    **MAMBA_LAYOUT,
    **NEMOTRON_H,
    **PHI3,
    **GPT2,
    **GPT_OSS,
}
# Kinds of files without a language model, and their contents, in words.
OTHER_KINDS: Final = {
    "mmproj": "the part of a model that sees images or hears",
    "adapter": "an adapter (LoRA)",
    "imatrix": "statistics for quantisation",
    "vocab": "a vocabulary",
}


def read_architecture(
    fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], floats: Floats | None = None
) -> tuple[Config, dict[str, tuple[TensorSource, ...]]]:
    """Describe a file in the terms of the model's family.

    Args:
        fields: metadata by key.
        shapes: shapes of tensors by name, rows first.
        floats: function that reads the values of a small tensor by its name; None refuses files with a part of their
            configuration in a tensor (the rotations of Llama 3 and Gemma 4).

    Returns:
        The content of a `config.json`, and for each name in the family's weight map the tensors of the file that are
        joined on dimension 0.

    Raises:
        UnsupportedModel: the architecture, or an option of it, is not implemented.
        CheckpointError: a field or tensor is missing or wrong; the message names it.
    """
    name = _name(fields)
    architecture = ARCHITECTURES[name]
    all_shapes = with_parts(shapes)
    metadata = Metadata(fields, name)
    config = architecture.read_config(metadata, all_shapes, floats)
    whole = as_whole_model(config, name, metadata, fields)
    spec, weight_map = build(whole)
    changes, ranges = architecture.changes(config), find_ranges(shapes, spec)

    def sources_of(source: str) -> tuple[TensorSource, ...]:
        stored = architecture.renamed(config, in_language_model(source))
        return find_sources(architecture, changes, stored, all_shapes, ranges)

    return whole, {source: sources_of(source) for sources in weight_map.values() for source in sources}


def _name(fields: Mapping[str, Any]) -> str:
    """Return the architecture of a file with a language model."""
    kind, name = fields.get("general.type", "model"), fields.get("general.architecture")
    if name == "clip":  # older vision encoders have no other mark
        kind = "mmproj"
    if kind != "model":
        content = OTHER_KINDS.get(kind, "no whole model") if isinstance(kind, str) else "no whole model"
        raise UnsupportedModel(
            f"general.type is {shown(kind)} and general.architecture {shown(name)}: the file holds {content}, but only "
            "whole language models are served",
            field="general.type",
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"general.architecture is {shown(name)}, which is not implemented; implemented are "
            f"{', '.join(ARCHITECTURES)}",
            field="general.architecture",
        )
    return name
