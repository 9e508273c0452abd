"""LFM2: gated short convolutions, and attention in every few layers; gated MLPs, or experts after the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.errors import CheckpointError
from quire.models.families.expert_layout import LINEAR_EXPERTS, read_counts, with_experts
from quire.models.families.hf_config import FULL, HFConfig, read_layer_kinds, read_max_position, read_rope
from quire.models.families.llama_layout import QKV, map_ends, map_modules, read_attention
from quire.models.specs.spec import Attention, Experts, GatedMLP, LayerSpec, ModelSpec, RMSNorm, ShortConv, WeightMap

CONV: Final = "conv"
# Values of fields that checkpoints leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
}
MOE_DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
# Added to the sum by which the chosen scores are divided.
SUM_EPS: Final = 1e-6
NORMS: Final = {"mixer_norm": ("operator_norm",), "ffn_norm": ("ffn_norm",)}
MLP: Final = {"ffn.gate_up": ("feed_forward.w1", "feed_forward.w3"), "ffn.down": ("feed_forward.w2",)}
ATTENTION: Final = {
    **QKV,
    "mixer.output": ("self_attn.out_proj",),
    "mixer.q_norm": ("self_attn.q_layernorm",),
    "mixer.k_norm": ("self_attn.k_layernorm",),
}
SHORT_CONV: Final = {
    "mixer.input": ("conv.in_proj",),
    "mixer.conv": ("conv.conv",),
    "mixer.output": ("conv.out_proj",),
}


def lfm2(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read an `Lfm2ForCausalLM`."""
    mlp_width = _read_mlp_width(config)
    config = config.filled(DEFAULTS)
    width = config.integer("hidden_size")
    norm = RMSNorm(config.number("norm_eps", 1e-5))
    rope = read_rope(config, 1e6)
    attention = replace(read_attention(config, rope), qk_norm=norm)
    conv = ShortConv(width, config.integer("conv_L_cache", 3, least=2), config.flag("conv_bias", False))
    attending = config.indices("full_attn_idxs") if config.has("full_attn_idxs") else None
    kinds = read_layer_kinds(config, (FULL, CONV), lambda idx: FULL if attending is None or idx in attending else CONV)
    mlp = GatedMLP(mlp_width)
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=width,
        layers=tuple(LayerSpec(norm, attention if kind == FULL else conv, mlp) for kind in kinds),
        norm=norm,
        tied_head=config.flag("tie_embedding", config.flag("tie_word_embeddings", True)),
        max_position=read_max_position(config, rope),
    )
    names = map_ends(spec, norm="embedding_norm")
    for idx, layer in enumerate(spec.layers):
        layer_names = f"layers.{idx}", f"model.layers.{idx}"
        names |= map_modules(*layer_names, NORMS) | map_modules(*layer_names, MLP)
        if isinstance(layer.mixer, Attention):
            names |= map_modules(*layer_names, ATTENTION)
        else:
            names |= map_modules(*layer_names, SHORT_CONV, has_bias=conv.bias)
    return spec, names


def lfm2_moe(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read an `Lfm2MoeForCausalLM`."""
    config = config.filled(MOE_DEFAULTS)
    read = lfm2(config.changed({"block_auto_adjust_ff_dim": False, "block_ff_dim": None}))
    is_normed, num_layers = config.flag("norm_topk_prob", True), len(read[0].layers)
    experts = Experts(
        *read_counts(config.changed({"num_hidden_layers": num_layers})),
        config.integer("moe_intermediate_size"),
        scoring="sigmoid",
        renormalised=is_normed,
        choice_bias=config.flag("use_expert_bias", True),
        sum_eps=SUM_EPS if is_normed else 0.0,
        score_scale=config.number("routed_scaling_factor", 1.0),
    )
    first = config.count("num_dense_layers", 2)
    if first >= num_layers:
        raise CheckpointError(
            f"config.json: num_dense_layers must leave one of {num_layers} layers for experts, got {first}",
            field="num_dense_layers",
        )
    with_stack, module = not config.flag(LINEAR_EXPERTS, False), "feed_forward"
    layers = range(first, num_layers)
    spec, names = with_experts(read, experts, layers, module, ("w1", "w3", "w2"), is_stacked=with_stack)
    if experts.choice_bias:
        for idx in layers:
            names[f"layers.{idx}.ffn.choice_bias.weight"] = (f"model.layers.{idx}.{module}.expert_bias",)
    return spec, names


def _read_mlp_width(config: HFConfig) -> int:
    """Read the width of the MLP: two thirds of the stated width, which is for an MLP without gates of equal size."""
    field = "block_ff_dim" if config.has("block_ff_dim") else "intermediate_size"
    width = config.integer(field, DEFAULTS["intermediate_size"])
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if config.is_null("block_ffn_dim_multiplier"):
        return width
    step = config.integer("block_multiple_of", 256)
    return -(-int(config.number("block_ffn_dim_multiplier", 1.0) * width) // step) * step
