"""GGUF files `mmproj`: the vision encoder of a model, which is stored apart from the language model.

The layout is llama.cpp's: the tensors of the encoder are named `v.*`, and the tensors of the merger `mm.*`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from quire.errors import CheckpointError, UnsupportedModel, shown
from quire.models.families.hf_config import HFConfig
from quire.models.families.vision_towers import FRAMES_APART, gemma3_vision, qwen_vision
from quire.models.gguf.architectures.metadata import MAX_LAYERS, Metadata
from quire.models.gguf.architectures.sources import TensorSource, Transform
from quire.models.gguf.opening import stored_tensor
from quire.models.gguf.reader import GGUFFile, GGUFTensor
from quire.models.specs.spec import WeightMap
from quire.models.specs.vision_spec import VisionSpec
from quire.models.tensors.stored_tensor import StoredTensor

ARCHITECTURE: Final = "clip"
# Limits of Qwen's published processors, for files without limits of their own.
MIN_PIXELS: Final = 65_536
MAX_PIXELS: Final = 16_777_216
MAX_SIDE: Final = 1 << 16
# Side of the squares of patches that Gemma 3 averages, for files that do not name it.
GEMMA3_SQUARE: Final = 4
GEMMA3_NORM: Final = "multi_modal_projector.mm_soft_emb_norm.weight"
# Module of the family -> module of the file.
_MODULES: Final[Mapping[str, str]] = {
    "model.visual.pos_embed": "v.position_embd",
    "model.visual.patch_embed.proj": "v.patch_embd",
    "model.visual.merger.norm": "v.post_ln",
    "model.visual.merger.linear_fc1": "mm.0",
    "model.visual.merger.linear_fc2": "mm.2",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.post_layernorm": "v.post_ln",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
}
_LAYER: Final[Mapping[str, str]] = {
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_DEEPSTACK: Final[Mapping[str, str]] = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
# Names of other forms, the family's -> the file's.
_WHOLE: Final[Mapping[str, str]] = {"multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight"}
_SWAPPED: Final[Mapping[str, str]] = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_NAME: Final = re.compile(
    r"(?:(?:model\.visual|vision_tower\.encoder)\.(blocks|layers|deepstack_merger_list)\.(\d+)\.)?"
    r"(.+)\.(weight|weight\.1|bias)"
)


class MmprojModel(NamedTuple):
    """The vision encoder of a file.

    Args:
        read: reader of the encoder's family, as in `TOWERS`.
        config: the fields of a `config.json` that describe the encoder.
        out_width: number of values of a token's features.
        num_deepstack: number of layers of the language model that read features of the encoder's layers.
        image_settings: the fields of a `preprocessor_config.json`.
        tensors: tensors by the family's names.
        fields: metadata by key.
    """

    read: Callable[[HFConfig], tuple[VisionSpec, WeightMap]]
    config: Mapping[str, Any]
    out_width: int
    num_deepstack: int
    image_settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    fields: Mapping[str, Any]


def open_mmproj(path: Path) -> MmprojModel:
    """Read a file's header.

    Raises:
        UnsupportedModel: the file holds no vision encoder, or one that is not implemented.
        CheckpointError: the file is damaged, or a field or a tensor is missing or wrong.
    """
    file = GGUFFile.open(path)
    try:
        metadata, projector = _metadata(file.fields)
        out_width = metadata.integer("vision.projection_dim")
        config = projector.read_config(metadata, file)
        text = {"text_config": {"hidden_size": out_width}}
        spec, names = projector.read(HFConfig({**config, **text}))
        return MmprojModel(
            projector.read,
            config,
            out_width,
            len(spec.deepstack),
            projector.read_settings(metadata, config["vision_config"]) | _read_values(metadata),
            _find_tensors(file, names, config["vision_config"]),
            file.fields,
        )
    except (CheckpointError, UnsupportedModel) as error:
        raise type(error)(f"{path}: {error}", field=error.field) from error


def _metadata(fields: Mapping[str, Any]) -> tuple[Metadata, _Projector]:
    """Return the fields and the projector of an encoder of images that is implemented."""
    name = fields.get("general.architecture")
    if name != ARCHITECTURE:
        raise UnsupportedModel(
            f"general.architecture is {shown(name)}, and that of a vision encoder is {ARCHITECTURE!r}",
            field="general.architecture",
        )
    metadata = Metadata(fields, ARCHITECTURE)
    if not metadata.flag("has_vision_encoder", False) or metadata.flag("has_audio_encoder", False):
        raise UnsupportedModel(
            "clip.has_vision_encoder must be true and clip.has_audio_encoder false or missing: only encoders of images "
            "are implemented",
            field="clip.has_vision_encoder",
        )
    key = "vision.projector_type" if metadata.has("vision.projector_type") else "projector_type"
    projector = metadata.text(key, "")
    if projector not in PROJECTORS:
        raise UnsupportedModel(
            f"{metadata.key(key)} is {shown(projector)}, but only {', '.join(PROJECTORS)} are implemented",
            field=metadata.key(key),
        )
    metadata.require("use_gelu", True)
    metadata.require("use_silu", False)
    return metadata, PROJECTORS[projector]


def _read_qwen(metadata: Metadata, file: GGUFFile) -> dict[str, Any]:
    """Return the fields of `qwen_vision`."""
    depth = metadata.integer("vision.block_count", most=MAX_LAYERS)
    num_positions, _ = _read_positions(metadata, file)
    flags = metadata.flags("vision.is_deepstack_layers", depth)
    vision = {
        "depth": depth,
        **_read_sizes(metadata, "num_heads"),
        "spatial_merge_size": metadata.integer("vision.spatial_merge_size", 2, most=MAX_SIDE),
        "out_hidden_size": metadata.integer("vision.projection_dim"),
        "num_position_embeddings": num_positions,
        "deepstack_visual_indexes": [idx for idx, flag in enumerate(flags) if flag],
        FRAMES_APART: True,
    }
    return {"vision_config": vision}


def _read_gemma3(metadata: Metadata, file: GGUFFile) -> dict[str, Any]:
    """Return the fields of `gemma3_vision`."""
    _, side = _read_positions(metadata, file)
    name = "vision.projector.scale_factor"
    square = metadata.integer(name, GEMMA3_SQUARE, most=MAX_SIDE)
    if side % square:
        raise metadata.wrong(name, square, f"a divisor of the {side} patches of a side")
    vision = {
        "num_hidden_layers": metadata.integer("vision.block_count", most=MAX_LAYERS),
        **_read_sizes(metadata, "num_attention_heads"),
        "image_size": metadata.integer("vision.image_size", most=MAX_SIDE),
        "vision_use_head": False,
    }
    return {"vision_config": vision, "mm_tokens_per_image": (side // square) ** 2}


def _read_sizes(metadata: Metadata, num_heads: str) -> dict[str, Any]:
    """Return the sizes of all encoders; `num_heads` is the name of the number of heads."""
    return {
        "hidden_size": metadata.integer("vision.embedding_length"),
        "intermediate_size": metadata.integer("vision.feed_forward_length"),
        num_heads: metadata.integer("vision.attention.head_count"),
        "patch_size": metadata.integer("vision.patch_size", most=MAX_SIDE),
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
    }


def _read_positions(metadata: Metadata, file: GGUFFile) -> tuple[int, int]:
    """Return the number of positions, which is a square, and its root."""
    patch = metadata.integer("vision.patch_size", most=MAX_SIDE)
    image_size = metadata.integer("vision.image_size", most=MAX_SIDE)
    table = file.tensors.get("v.position_embd.weight")
    if table is None:
        raise CheckpointError("the file has no tensor 'v.position_embd.weight'", field="v.position_embd.weight")
    num_positions = table.shape[0]
    side = math.isqrt(num_positions)
    if side * patch != image_size or side**2 != num_positions:
        raise metadata.wrong(
            "vision.image_size",
            image_size,
            f"the side of the square of {num_positions:,} patches of side {patch} that v.position_embd.weight has",
        )
    return num_positions, side


def _by_pixels(metadata: Metadata, _vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class and the limits of Qwen's image processor."""
    least = metadata.integer("vision.image_min_pixels", MIN_PIXELS)
    most = metadata.integer("vision.image_max_pixels", max(MAX_PIXELS, least))
    if most < least:
        raise metadata.wrong("vision.image_max_pixels", most, f"at least clip.vision.image_min_pixels ({least})")
    size = {"shortest_edge": least, "longest_edge": most}
    return {"image_processor_type": "Qwen2VLImageProcessor", "size": size}


def _of_one_size(_metadata: Metadata, vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class and the size of Gemma 3's image processor."""
    size = dict.fromkeys(("height", "width"), vision["image_size"])
    return {"image_processor_type": "Gemma3ImageProcessor", "size": size}


def _read_values(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of an image processor that say how values are normalised."""
    mean, std = (list(metadata.numbers(f"vision.image_{name}", 3)) for name in ("mean", "std"))
    if not all(0 <= value < math.inf for value in mean):
        raise metadata.wrong("vision.image_mean", mean, "three numbers of at least 0")
    if not all(0 < value < math.inf for value in std):
        raise metadata.wrong("vision.image_std", std, "three positive numbers")
    return {"image_mean": mean, "image_std": std}


class _Projector(NamedTuple):
    """An encoder with its projector: the reader of its family, and readers of the fields of both configurations."""

    read: Callable[[HFConfig], tuple[VisionSpec, WeightMap]]
    read_config: Callable[[Metadata, GGUFFile], dict[str, Any]]
    read_settings: Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]


# Value of `clip.projector_type` -> its encoder.
PROJECTORS: Final[Mapping[str, _Projector]] = {
    "gemma3": _Projector(gemma3_vision, _read_gemma3, _of_one_size),
    "qwen3vl_merger": _Projector(qwen_vision, _read_qwen, _by_pixels),
}


def _find_tensors(file: GGUFFile, names: WeightMap, vision: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of the encoder; a tensor that it does not read would change its output."""
    deepstack, swapped = vision.get("deepstack_visual_indexes", []), _has_swapped_mlps(file, vision)
    stored = {name: _stored_name(name, deepstack, swapped) for sources in names.values() for name in sources}
    missing = next((theirs for theirs in stored.values() if theirs not in file.tensors), None)
    if missing is not None:
        raise CheckpointError(f"the file has no tensor {shown(missing)}", field=missing)
    unused = sorted(file.tensors.keys() - stored.values())
    if unused:
        raise UnsupportedModel(
            f"the tensor {shown(unused[0])} is none of an encoder with this projector", field=unused[0]
        )
    return {ours: _tensor(file.tensors[theirs], ours) for ours, theirs in stored.items()}


def _tensor(tensor: GGUFTensor, name: str) -> StoredTensor:
    transform: Transform | None = "minus_one" if name == GEMMA3_NORM else None
    return stored_tensor(tensor, TensorSource(tensor.name, None, None, None, None, transform, tensor.shape))


def _has_swapped_mlps(file: GGUFFile, vision: Mapping[str, Any]) -> bool:
    """Return whether the first matrix of an MLP is named `ffn_down`, as in Gemma 3's first files."""
    first = file.tensors.get("v.blk.0.ffn_down.weight")
    sizes = vision["intermediate_size"], vision["hidden_size"]
    return first is not None and first.shape == sizes and sizes[0] != sizes[1]


def _stored_name(name: str, deepstack: list[int], swapped: bool) -> str:
    """Return the name in the file of a tensor of the family.

    Args:
        name: name of the tensor.
        deepstack: numbers of the encoder's layers with deepstack.
        swapped: whether the two matrices of an MLP have each other's names.
    """
    if name in _WHOLE:
        return _WHOLE[name]
    match = _NAME.fullmatch(name)
    assert match is not None, name
    part, number, module, kind = match.groups()
    if part is None:
        return f"{_MODULES[module]}.{kind}"
    if part == "deepstack_merger_list":
        return f"v.deepstack.{deepstack[int(number)]}.{_DEEPSTACK[module]}.{kind}"
    stored = _LAYER[module]
    return f"v.blk.{number}.{_SWAPPED.get(stored, stored) if swapped else stored}.{kind}"
