"""Bamba: Mamba 2, and attention that rotates half of each head, each with a gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.models.families.hf_config import FULL, HFConfig, read_layer_kinds, read_max_position, read_partial_rope
from quire.models.families.llama_layout import OUTPUT, QKV, map_ends, map_modules, read_attention
from quire.models.families.mamba_layout import map_mamba2, read_mamba2
from quire.models.specs.spec import Attention, GatedMLP, LayerSpec, Mamba2, ModelSpec, RMSNorm, WeightMap

RECURRENT: Final = "linear_attention"
# Names of the kinds of layer in older checkpoints.
OLDER: Final = {"attention": FULL, "mamba": RECURRENT}
NORMS: Final = {"mixer_norm": ("input_layernorm",), "ffn_norm": ("pre_ff_layernorm",)}
MLP: Final = {
    "ffn.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "ffn.down": ("feed_forward.down_proj",),
}


def bamba(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `BambaForCausalLM`."""
    config = config.filled({"hidden_act": "silu", "partial_rotary_factor": 0.5})
    norm = RMSNorm(config.number("rms_norm_eps", 1e-5))
    has_bias, attending = config.flag("attention_bias", False), config.indices("attn_layer_indices")
    attention = replace(read_attention(config, None), qkv_bias=has_bias, output_bias=has_bias)
    attention = replace(attention, rope=read_partial_rope(config, attention.head_dim, 0.5))
    mamba = read_mamba2(config, config.integer("hidden_size") * config.integer("mamba_expand", 2), norm)
    kinds = read_layer_kinds(config, (FULL, RECURRENT), lambda idx: FULL if idx in attending else RECURRENT, OLDER)
    mlp = GatedMLP(config.integer("intermediate_size"), config.flag("mlp_bias", False))
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(LayerSpec(norm, attention if kind == FULL else mamba, mlp) for kind in kinds),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_position=read_max_position(config, attention.rope),
    )
    names = map_ends(spec, norm="final_layernorm")
    for idx, layer in enumerate(spec.layers):
        layer_names = ours, theirs = f"layers.{idx}", f"model.layers.{idx}"
        names |= map_modules(*layer_names, NORMS) | map_modules(*layer_names, MLP, has_bias=mlp.bias)
        if isinstance(layer.mixer, Attention):
            names |= map_modules(*layer_names, {**QKV, **OUTPUT}, has_bias=has_bias)
        elif isinstance(layer.mixer, Mamba2):
            names |= map_mamba2(f"{ours}.mixer", f"{theirs}.mamba", layer.mixer)
    return spec, names
