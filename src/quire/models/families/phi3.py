"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused projections, LongRoPE, and partial rotation of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from quire.errors import CheckpointError
from quire.models.families.hf_config import FULL, WINDOWED, HFConfig, read_num_turned, refuse_layer_types
from quire.models.families.llama_layout import NORMS, OUTPUT, map_ends, map_modules, read_attention, read_llama_layout
from quire.models.specs.rotations import LongRopeScaling, Rope
from quire.models.specs.spec import ModelSpec, WeightMap

# Values of fields that checkpoints may leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
# Names of LongRoPE in configurations, the current one first.
LONGROPE: Final = ("longrope", "su", "yarn")
MODULES: Final = {
    **{name: (norm,) for name, norm in NORMS.items()},
    **OUTPUT,
    "mixer.qkv": ("self_attn.qkv_proj",),
    "ffn.gate_up": ("mlp.gate_up_proj",),
    "ffn.down": ("mlp.down_proj",),
}


def phi3(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Phi3ForCausalLM`."""
    config = config.filled(DEFAULTS)
    config.require("lm_head_bias", False)
    num_layers = config.integer("num_hidden_layers")
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    refuse_layer_types(config, FULL if window is None else WINDOWED)
    # Checkpoints for long contexts state a window as long as the longest context.
    if window is not None and window >= config.integer("max_position_embeddings"):
        window = None
    rope = _read_rope(config, read_attention(config, None).head_dim)
    spec, _ = read_llama_layout(config, windows=(window,) * num_layers, rope=rope)
    names = map_ends(spec)
    for idx in range(num_layers):
        names |= map_modules(f"layers.{idx}", f"model.layers.{idx}", MODULES)
    return spec, names


def _read_rope(config: HFConfig, head_dim: int) -> Rope:
    """Read the rotation of a head's leading values; a LongRoPE scaling has a factor for each pair of them."""
    part = config.part("rope_parameters") or config.part("rope_scaling") or HFConfig({})
    num_turned = read_num_turned(config, part, head_dim, 1.0)
    for kind in ("rope_type", "type"):
        part.require(kind, None, "default", *LONGROPE)
    scaling = None
    if part.text("rope_type", part.text("type", "default")) in LONGROPE:
        scaling = _read_longrope(config, part, num_turned // 2)
    theta = part.number("rope_theta", config.number("rope_theta", 1e4))
    return Rope(theta, scaling, None if num_turned == head_dim else num_turned)


def _read_longrope(config: HFConfig, part: HFConfig, num_factors: int) -> LongRopeScaling:
    name = "original_max_position_embeddings"
    longest, original = config.integer("max_position_embeddings"), config.integer(name)
    factor = part.number("factor", longest / original)
    if part.has("attention_factor"):
        attention_factor = part.number("attention_factor")
    elif factor > 1 and original == 1:
        raise CheckpointError(f"config.json: {name} must be at least 2 without attention_factor, got 1", field=name)
    else:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = part.vector("short_factor", num_factors), part.vector("long_factor", num_factors)
    return LongRopeScaling(short, long, original, attention_factor, longest > original)
