"""gpt-oss: attention sinks, windows in every second layer, and experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.models.families.expert_layout import BLOCK_EXPERTS, LINEAR_EXPERTS, map_experts, read_counts
from quire.models.families.hf_config import HFConfig, read_max_position, read_rope, read_windows
from quire.models.families.llama_layout import NORMS, OUTPUT, QKV, map_ends, map_modules, read_attention
from quire.models.specs.spec import Experts, LayerSpec, ModelSpec, RMSNorm, WeightMap

# Values of fields that checkpoints may leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "num_local_experts": 128,
}
ROPE: Final[Mapping[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `GptOssForCausalLM`."""
    config = config.filled(DEFAULTS)
    config.require("hidden_act", None, "silu")
    config.require("swiglu_alpha", None, 1.702)
    config.require("swiglu_limit", None, 7.0)
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        config = config.changed({"rope_parameters": ROPE})
    norm = RMSNorm(config.number("rms_norm_eps"), wide=True)
    is_linear, is_in_blocks = config.flag(LINEAR_EXPERTS, False), config.flag(BLOCK_EXPERTS, False)
    rope, has_bias = read_rope(config, 150_000.0), config.flag("attention_bias", True)
    attention = replace(read_attention(config, rope), qkv_bias=has_bias, output_bias=has_bias, sinks=True)
    experts = Experts(
        *read_counts(config, chosen=4),
        config.integer("intermediate_size"),
        # The softmax over the chosen logits is the softmax over all logits, divided by the sum of the chosen.
        renormalised=True,
        activation="swigluoai",
        transposed=not (is_linear or is_in_blocks),
        bias=True,
        interleaved=not is_linear,
        parameters="alternating",
    )
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(
            LayerSpec(norm, replace(attention, window=window), experts)
            for window in read_windows(config, lambda idx: idx % 2 == 0)
        ),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_position=read_max_position(config, rope),
    )
    return spec, _map_weights(spec, has_bias, is_linear, is_in_blocks)


def _map_weights(spec: ModelSpec, has_bias: bool, is_linear: bool, is_in_blocks: bool) -> WeightMap:
    """Name the checkpoint's tensors."""
    names = map_ends(spec)
    for idx, layer in enumerate(spec.layers):
        assert isinstance(layer.ffn, Experts)
        layer_names = ours, theirs = f"layers.{idx}", f"model.layers.{idx}"
        names |= map_modules(*layer_names, {name: (norm,) for name, norm in NORMS.items()})
        names |= map_modules(*layer_names, {**QKV, **OUTPUT}, has_bias=has_bias)
        names |= map_modules(*layer_names, {"ffn.router": ("mlp.router",)}, has_bias=True)
        names[f"{ours}.mixer.sinks.weight"] = (f"{theirs}.self_attn.sinks",)
        if is_linear:
            for kind in ("weight", "bias"):
                names |= map_experts(f"{ours}.ffn", f"{theirs}.mlp", layer.ffn.num_experts, kind=kind)
            continue
        for part in ("gate_up", "down"):
            stack = f"{theirs}.mlp.experts.{part}_proj"
            names[f"{ours}.ffn.{part}.bias"] = (f"{stack}_bias",)
            names[f"{ours}.ffn.{part}.weight"] = (f"{stack}.weight" if is_in_blocks else stack,)
    return names
