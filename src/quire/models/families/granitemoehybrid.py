"""Granite 4: Mamba 2 and attention without positions, or attention alone, and multipliers everywhere.

Each layer has a gated MLP, or experts with that MLP as the shared expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.models.families.expert_layout import LINEAR_EXPERTS, map_experts, read_counts
from quire.models.families.hf_config import FULL, HFConfig, read_layer_kinds, read_max_position, read_rope
from quire.models.families.llama_layout import NORMS, OUTPUT, QKV, map_ends, map_modules, read_attention
from quire.models.families.mamba_layout import map_mamba2, read_mamba2
from quire.models.specs.spec import Attention, Experts, GatedMLP, LayerSpec, Mamba2, ModelSpec, RMSNorm, WeightMap

RECURRENT: Final = "linear_attention"
# Names of the kinds of layer in older checkpoints.
OLDER: Final = {"attention": FULL, "mamba": RECURRENT}
MLP: Final = {"ffn.gate_up": ("shared_mlp.input_linear",), "ffn.down": ("shared_mlp.output_linear",)}
ROUTER: Final = {"ffn.router": ("block_sparse_moe.router.layer",)}
SHARED: Final = {"ffn.shared.gate_up": MLP["ffn.gate_up"], "ffn.shared.down": MLP["ffn.down"]}
# Experts of a layer in one tensor, [X, out, in].
STACKS: Final = {
    "ffn.gate_up": ("block_sparse_moe.input_linear",),
    "ffn.down": ("block_sparse_moe.output_linear",),
}


def granitemoehybrid(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `GraniteMoeHybridForCausalLM`."""
    config = config.filled({"num_local_experts": 8, "hidden_act": "silu"})
    config.require("hidden_act", "silu")
    config.require("position_embedding_type", "rope", "nope")
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6))
    rope = read_rope(config) if config.text("position_embedding_type", "nope") == "rope" else None
    has_bias = config.flag("attention_bias", False)
    attention = replace(read_attention(config, rope), qkv_bias=has_bias, output_bias=has_bias)
    kinds = read_layer_kinds(config, (FULL, RECURRENT), lambda _: RECURRENT, OLDER)
    inner = config.integer("hidden_size") * config.integer("mamba_expand", 2)
    mixers = {kind: attention if kind == FULL else read_mamba2(config, inner, norm) for kind in kinds}
    ffn = _read_ffn(config)
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(LayerSpec(norm, mixers[kind], ffn) for kind in kinds),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_position=read_max_position(config, rope),
    )
    spec, names = read_multipliers(config, spec), map_ends(spec)
    for idx, layer in enumerate(spec.layers):
        layer_names = f"layers.{idx}", f"model.layers.{idx}"
        names |= map_modules(*layer_names, {name: (norm,) for name, norm in NORMS.items()})
        if isinstance(ffn, Experts):
            names |= map_modules(*layer_names, ROUTER | (SHARED if ffn.shared_width else {}))
            if config.flag(LINEAR_EXPERTS, False):
                experts = f"layers.{idx}.ffn", f"model.layers.{idx}.block_sparse_moe"
                names |= map_experts(*experts, ffn.num_experts)
            else:
                names |= map_modules(*layer_names, STACKS)
        else:
            names |= map_modules(*layer_names, MLP)
        if isinstance(layer.mixer, Attention):
            names |= map_modules(*layer_names, QKV, has_bias=has_bias) | map_modules(
                *layer_names, OUTPUT, has_bias=has_bias
            )
        elif isinstance(layer.mixer, Mamba2):
            names |= map_mamba2(f"layers.{idx}.mixer", f"model.layers.{idx}.mamba", layer.mixer)
    return spec, names


def read_multipliers(config: HFConfig, spec: ModelSpec) -> ModelSpec:
    """Read the multipliers of scores, of the outputs of all mixers and FFNs, of embeddings and of logits."""
    score_scale, scale = config.number("attention_multiplier", 1.0), config.number("residual_multiplier", 1.0)
    layers = (
        replace(layer, mixer=replace(layer.mixer, score_scale=score_scale))
        if isinstance(layer.mixer, Attention)
        else layer
        for layer in spec.layers
    )
    return replace(
        spec,
        layers=tuple(replace(layer, mixer_scale=scale, ffn_scale=scale) for layer in layers),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


def _read_ffn(config: HFConfig) -> GatedMLP | Experts:
    """Read the experts, with a shared one of width 0 for none, or the gated MLP of a model without experts."""
    if not config.count("num_local_experts", 0):
        return GatedMLP(config.integer("shared_intermediate_size", 1024))
    width = config.count("shared_intermediate_size", 1024)
    counts = read_counts(config.changed({"num_experts": None}), chosen=2)
    return Experts(*counts, config.integer("intermediate_size", 11008), renormalised=True, shared_width=width)
