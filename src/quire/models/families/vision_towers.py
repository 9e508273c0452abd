"""The vision encoders inside of Qwen3-VL, Qwen3.5 and Gemma 3."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from quire.errors import CheckpointError
from quire.models.families.encoder_layout import read_elementwise, read_heads
from quire.models.families.hf_config import HFConfig, text_config
from quire.models.families.llama_layout import map_modules, renamed_sources
from quire.models.specs.encoder_spec import EncoderLayer, EncoderMLP
from quire.models.specs.norm_spec import LayerNorm, RMSNorm
from quire.models.specs.spec import WeightMap
from quire.models.specs.vision_spec import AveragedSquares, JoinedSquares, VisionSpec

# Quire's name -> modules of the checkpoint, each with a bias.
_QWEN_LAYER: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("attn.qkv",),
    "output": ("attn.proj",),
    "mixer_norm": ("norm1",),
    "ffn_norm": ("norm2",),
    "ffn.up": ("mlp.linear_fc1",),
    "ffn.down": ("mlp.linear_fc2",),
}
_QWEN_MERGER: Final[Mapping[str, tuple[str, ...]]] = {
    "norm": ("norm",),
    "up": ("linear_fc1",),
    "down": ("linear_fc2",),
}
_SIGLIP_LAYER: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.out_proj",),
    "mixer_norm": ("layer_norm1",),
    "ffn_norm": ("layer_norm2",),
    "ffn.up": ("mlp.fc1",),
    "ffn.down": ("mlp.fc2",),
}
_QWEN_PREFIX: Final = "model.visual"
# Field that is added to the configuration of files with a tensor for each frame of a patch, numbered after the first.
FRAMES_APART: Final = "frames_of_patches_are_apart"
# Field that is added to the configuration of files whose vocabulary lacks the token of an image: the text of another.
STAND_IN: Final = "image_token_stand_in"
_SIGLIP_PREFIX, _SIGLIP_PROJECTOR = "vision_tower", "multi_modal_projector"
# Older checkpoints have one more module in between.
_SIGLIP_INNER: Final = "vision_tower.vision_model"


def qwen_vision(config: HFConfig) -> tuple[VisionSpec, WeightMap]:
    """Read the encoder of a `Qwen3VLForConditionalGeneration` or a `Qwen3_5ForConditionalGeneration`.

    Positions are resampled to the grid of each image, and heads are rotated by row and column. Qwen3.5 has no
    deepstack layers.
    """
    vision = _vision_config(config)
    side, num_layers = vision.integer("patch_size", 16), vision.integer("depth")
    heads = read_heads(vision.renamed({"num_attention_heads": "num_heads"}), bias=True)
    if heads.head_dim % 4:
        raise CheckpointError(
            f"config.json: heads of vision_config must have a multiple of 4 values, got {heads.head_dim}",
            field="num_heads",
        )
    mlp = EncoderMLP(vision.integer("intermediate_size"), read_elementwise(vision, "hidden_act", "gelu_pytorch_tanh"))
    norm = LayerNorm(vision.number("layer_norm_eps", 1e-6))
    layer = EncoderLayer(heads, mlp, norm, norm, norm_first=True)
    rope = vision.part("rope_parameters") or HFConfig({})
    rope.require("rope_type", "axial")
    deepstack = vision.ascending("deepstack_visual_indexes", num_layers)
    num_frames, frames_apart = vision.integer("temporal_patch_size", 2), vision.flag(FRAMES_APART, False)
    spec = VisionSpec(
        patch_shape=(vision.integer("in_channels", 3), num_frames, side, side),
        width=vision.integer("hidden_size"),
        layers=(layer,) * num_layers,
        table_side=_root(vision, "num_position_embeddings"),
        is_resampled=True,
        rope_theta=rope.number("rope_theta", 10_000.0),
        norm=None,
        merge_size=vision.integer("spatial_merge_size", 2),
        out_width=vision.integer("out_hidden_size"),
        merger=JoinedSquares(norm, norm_joined=False, activation="gelu"),
        deepstack=deepstack,
        deepstack_merger=JoinedSquares(norm, norm_joined=True, activation="gelu") if deepstack else None,
        frames_apart=frames_apart,
    )
    prefix = _QWEN_PREFIX
    names: WeightMap = {"positions.weight": (f"{prefix}.pos_embed.weight",)}
    names |= _named("patches", f"{prefix}.patch_embed.proj")
    if frames_apart:
        (patches,) = names["patches.weight"]
        names["patches.weight"] = (patches, *(f"{patches}.{frame}" for frame in range(1, num_frames)))
    names |= map_modules("merger", f"{prefix}.merger", _QWEN_MERGER, has_bias=True)
    for idx in range(num_layers):
        names |= map_modules(f"layers.{idx}", f"{prefix}.blocks.{idx}", _QWEN_LAYER, has_bias=True)
    for idx in range(len(deepstack)):
        theirs = f"{prefix}.deepstack_merger_list.{idx}"
        names |= map_modules(f"deepstack.{idx}", theirs, _QWEN_MERGER, has_bias=True)
    return spec, names


def gemma3_vision(config: HFConfig) -> tuple[VisionSpec, WeightMap]:
    """Read the encoder of a `Gemma3ForConditionalGeneration`: a SigLIP for images of one size."""
    vision = _vision_config(config)
    patch, size = vision.integer("patch_size", 14), vision.integer("image_size", 896)
    side, tokens_side = size // patch, _root(config, "mm_tokens_per_image", 256)
    if size % patch or side % tokens_side:
        raise CheckpointError(
            f"config.json: vision_config.image_size ({size}) must be a multiple of patch_size ({patch}) times the root"
            f" of mm_tokens_per_image ({tokens_side})",
            field="image_size",
        )
    vision.require("vision_use_head", None, False)
    norm = LayerNorm(vision.number("layer_norm_eps", 1e-6))
    mlp = EncoderMLP(vision.integer("intermediate_size"), read_elementwise(vision, "hidden_act", "gelu_pytorch_tanh"))
    layer = EncoderLayer(read_heads(vision, bias=True), mlp, norm, norm, norm_first=True)
    spec = VisionSpec(
        patch_shape=(vision.integer("num_channels", 3), patch, patch),
        width=vision.integer("hidden_size"),
        layers=(layer,) * vision.integer("num_hidden_layers"),
        table_side=side,
        is_resampled=False,
        rope_theta=None,
        norm=norm,
        merge_size=side // tokens_side,
        out_width=text_config(config).integer("hidden_size"),
        merger=AveragedSquares(RMSNorm(norm.eps, zero_centred=True)),
    )
    tower, projector = _SIGLIP_PREFIX, _SIGLIP_PROJECTOR
    names: WeightMap = {
        "positions.weight": (f"{tower}.embeddings.position_embedding.weight",),
        "merger.norm.weight": (f"{projector}.mm_soft_emb_norm.weight",),
        "merger.projection.weight": (f"{projector}.mm_input_projection_weight",),
    }
    names |= _named("patches", f"{tower}.embeddings.patch_embedding") | _named("norm", f"{tower}.post_layernorm")
    for idx in range(len(spec.layers)):
        names |= map_modules(f"layers.{idx}", f"{tower}.encoder.layers.{idx}", _SIGLIP_LAYER, has_bias=True)
    return spec, names


class Tower(NamedTuple):
    """The vision encoder of an architecture, and the text and token of its images.

    Args:
        read: reader of the encoder.
        token_field, token_id: field of config.json with the token of an image in a prompt, and its default.
        token: text of that token in vocabularies.
        placeholder: text of an image in templates and prompts, and the text that is tokenized instead; None if they are
            the same.
        stand_in: text of a control token that no prompt has, for vocabularies without `token`. The embedding of neither
            is read: an image has its features.
    """

    read: Callable[[HFConfig], tuple[VisionSpec, WeightMap]]
    token_field: str
    token_id: int
    token: str
    placeholder: tuple[str, str] | None = None
    stand_in: str | None = None

    def placeholder_of(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return `placeholder` for the vocabulary of a checkpoint."""
        if self.placeholder is None:
            return None
        text, tokenized = self.placeholder
        return text, tokenized.replace(self.token, HFConfig(config).text(STAND_IN, self.token))

    def image_token(self, config: Mapping[str, Any]) -> int:
        """Return the token that stands for an image in a prompt."""
        return HFConfig(config).count(self.token_field, self.token_id)


_QWEN: Final = Tower(qwen_vision, "image_token_id", 151655, "<|image_pad|>")
# Name under "architectures" in a checkpoint's config.json -> its vision encoder.
TOWERS: Final[Mapping[str, Tower]] = {
    "Gemma3ForConditionalGeneration": Tower(
        gemma3_vision,
        "image_token_index",
        262144,
        "<image_soft_token>",
        ("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"),
        "<pad>",
    ),
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
}
_PREFIXES: Final = tuple(f"{name}." for name in (_QWEN_PREFIX, _SIGLIP_PREFIX, _SIGLIP_PROJECTOR))


def build_vision(config: Mapping[str, Any], tensors: Iterable[str]) -> tuple[VisionSpec, WeightMap] | None:
    """Return the vision encoder of a checkpoint whose images can be prompts, and its tensors; None for others.

    Args:
        config: fields of config.json.
        tensors: names of the checkpoint's tensors.
    """
    tower = find_tower(config)
    if tower is None:
        return None
    spec, names = tower.read(HFConfig(config))
    if any(name.startswith(f"{_SIGLIP_INNER}.") for name in tensors):
        names = renamed_sources(names, partial(re.sub, f"^{_SIGLIP_PREFIX}\\.", f"{_SIGLIP_INNER}."))
    return spec, names


def is_of_vision(config: Mapping[str, Any], tensor: str) -> bool:
    """Return whether a tensor is one of a vision encoder in `TOWERS`, and so no part of the decoder."""
    return tensor.startswith(_PREFIXES) and find_tower(config) is not None


def find_tower(config: Mapping[str, Any]) -> Tower | None:
    """Return the vision encoder of a checkpoint's architecture; None if it has none, or one that is not implemented."""
    names = config.get("architectures")
    return TOWERS.get(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None


def _vision_config(config: HFConfig) -> HFConfig:
    vision = config.part("vision_config")
    if vision is None:
        raise CheckpointError("config.json lacks the field vision_config", field="vision_config")
    return vision


def _named(ours: str, theirs: str) -> WeightMap:
    return {f"{ours}.{kind}": (f"{theirs}.{kind}",) for kind in ("weight", "bias")}


def _root(config: HFConfig, name: str, default: int | None = None) -> int:
    """Read a square number, and return its root."""
    value = config.integer(name, default)
    root = math.isqrt(value)
    if root * root != value:
        raise CheckpointError(f"config.json: {name} must be a square number, got {value}", field=name)
    return root
