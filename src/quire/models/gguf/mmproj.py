"""GGUF files `mmproj`: the vision encoder of a model, which is stored apart from the language model.

The layout is llama.cpp's: the tensors of the encoder are named `v.*`, and the tensors of the merger `mm.*`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from quire.errors import CheckpointError, UnsupportedModel, shown
from quire.models.families.hf_config import HFConfig
from quire.models.families.vision_towers import FRAMES_APART, qwen_vision
from quire.models.gguf.architectures.metadata import MAX_LAYERS, Metadata
from quire.models.gguf.architectures.sources import TensorSource
from quire.models.gguf.opening import stored_tensor
from quire.models.gguf.reader import GGUFFile
from quire.models.tensors.stored_tensor import StoredTensor

ARCHITECTURE: Final = "clip"
# Projectors that are implemented, and the class of images' processors whose fields files do not have.
PROJECTORS: Final[Mapping[str, str]] = {"qwen3vl_merger": "Qwen2VLImageProcessor"}
# Limits of the published processors of these models, for files without limits of their own.
MIN_PIXELS: Final = 65_536
MAX_PIXELS: Final = 16_777_216
MAX_SIDE: Final = 1 << 16
# Module of the family -> module of the file.
_MODULES: Final[Mapping[str, str]] = {
    "pos_embed": "v.position_embd",
    "patch_embed.proj": "v.patch_embd",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}
_LAYER: Final[Mapping[str, str]] = {
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_DEEPSTACK: Final[Mapping[str, str]] = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
_NAME: Final = re.compile(r"model\.visual\.(?:(blocks|deepstack_merger_list)\.(\d+)\.)?(.+)\.(weight|weight\.1|bias)")


class MmprojModel(NamedTuple):
    """The vision encoder of a file.

    Args:
        vision_config: the field of this name of a `config.json`.
        image_settings: the fields of a `preprocessor_config.json`.
        tensors: tensors by the family's names.
        fields: metadata by key.
    """

    vision_config: Mapping[str, Any]
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
        metadata = _metadata(file.fields)
        vision_config = _read_config(metadata, file)
        return MmprojModel(vision_config, _read_settings(metadata), _find_tensors(file, vision_config), file.fields)
    except (CheckpointError, UnsupportedModel) as error:
        raise type(error)(f"{path}: {error}", field=error.field) from error


def _metadata(fields: Mapping[str, Any]) -> Metadata:
    """Return the fields of an encoder of images that is implemented."""
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
            f"{metadata.key(key)} is {shown(projector)}, but only {', '.join(PROJECTORS)} is implemented",
            field=metadata.key(key),
        )
    metadata.require("use_gelu", True)
    metadata.require("use_silu", False)
    return metadata


def _read_config(metadata: Metadata, file: GGUFFile) -> dict[str, Any]:
    """Return the field `vision_config` of the family."""
    depth = metadata.integer("vision.block_count", most=MAX_LAYERS)
    patch = metadata.integer("vision.patch_size", most=MAX_SIDE)
    image_size = metadata.integer("vision.image_size", most=MAX_SIDE)
    table = file.tensors.get("v.position_embd.weight")
    if table is None:
        raise CheckpointError("the file has no tensor 'v.position_embd.weight'", field="v.position_embd.weight")
    num_positions = table.shape[0]
    if math.isqrt(num_positions) * patch != image_size or math.isqrt(num_positions) ** 2 != num_positions:
        raise metadata.wrong(
            "vision.image_size",
            image_size,
            f"the side of the square of {num_positions:,} patches of side {patch} that v.position_embd.weight has",
        )
    flags = metadata.flags("vision.is_deepstack_layers", depth)
    return {
        "depth": depth,
        "hidden_size": metadata.integer("vision.embedding_length"),
        "intermediate_size": metadata.integer("vision.feed_forward_length"),
        "num_heads": metadata.integer("vision.attention.head_count"),
        "patch_size": patch,
        "spatial_merge_size": metadata.integer("vision.spatial_merge_size", 2, most=MAX_SIDE),
        "out_hidden_size": metadata.integer("vision.projection_dim"),
        "num_position_embeddings": num_positions,
        "deepstack_visual_indexes": [idx for idx, flag in enumerate(flags) if flag],
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        FRAMES_APART: True,
    }


def _read_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of the image processor."""
    least = metadata.integer("vision.image_min_pixels", MIN_PIXELS)
    most = metadata.integer("vision.image_max_pixels", max(MAX_PIXELS, least))
    if most < least:
        raise metadata.wrong("vision.image_max_pixels", most, f"at least clip.vision.image_min_pixels ({least})")
    mean, std = (list(metadata.numbers(f"vision.image_{name}", 3)) for name in ("mean", "std"))
    if not all(0 <= value < math.inf for value in mean):
        raise metadata.wrong("vision.image_mean", mean, "three numbers of at least 0")
    if not all(0 < value < math.inf for value in std):
        raise metadata.wrong("vision.image_std", std, "three positive numbers")
    return {
        "image_processor_type": next(iter(PROJECTORS.values())),
        "size": {"shortest_edge": least, "longest_edge": most},
        "image_mean": mean,
        "image_std": std,
    }


def _find_tensors(file: GGUFFile, vision_config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of the encoder; a tensor that it does not read would change its output."""
    _, names = qwen_vision(HFConfig({"vision_config": vision_config}))
    stored = {
        name: _stored_name(name, vision_config["deepstack_visual_indexes"])
        for sources in names.values()
        for name in sources
    }
    missing = next((theirs for theirs in stored.values() if theirs not in file.tensors), None)
    if missing is not None:
        raise CheckpointError(f"the file has no tensor {shown(missing)}", field=missing)
    unused = sorted(file.tensors.keys() - stored.values())
    if unused:
        raise UnsupportedModel(
            f"the tensor {shown(unused[0])} is none of an encoder with this projector", field=unused[0]
        )
    return {
        ours: stored_tensor(
            file.tensors[theirs], TensorSource(theirs, None, None, None, None, None, file.tensors[theirs].shape)
        )
        for ours, theirs in stored.items()
    }


def _stored_name(name: str, deepstack: list[int]) -> str:
    """Return the name in the file of a tensor of the family."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    part, number, module, kind = match.groups()
    if part is None:
        return f"{_MODULES[module]}.{kind}"
    if part == "blocks":
        return f"v.blk.{number}.{_LAYER[module]}.{kind}"
    return f"v.deepstack.{deepstack[int(number)]}.{_DEEPSTACK[module]}.{kind}"
