"""Llama 4 (text): chunked attention, some layers without rotation, experts and a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.errors import UnsupportedModel
from quire.models.families.expert_layout import LINEAR_EXPERTS, map_experts, read_counts
from quire.models.families.hf_config import (
    FULL,
    HFConfig,
    read_activation,
    read_layer_kinds,
    read_max_position,
    read_rope,
    text_config,
)
from quire.models.families.layer_fields import read_expert_layers, read_turned
from quire.models.families.llama_layout import (
    NORMS,
    OUTPUT,
    QKV,
    map_ends,
    map_modules,
    read_attention,
    renamed_sources,
)
from quire.models.specs.rotations import Temperature
from quire.models.specs.spec import Attention, Experts, GatedMLP, LayerSpec, ModelSpec, RMSNorm, WeightMap

CHUNKED: Final = "chunked_attention"
# Values of fields that checkpoints leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_chunk_size": 8192,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
}
# Rotations that keep the length of a head, because norms of heads come before the rotation here and after it in the
# model.
ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3")
MLP: Final = {
    "ffn.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "ffn.down": ("feed_forward.down_proj",),
}
EXPERTS: Final = {
    "ffn.router": ("feed_forward.router",),
    "ffn.shared.gate_up": ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    "ffn.shared.down": ("feed_forward.shared_expert.down_proj",),
}
# Tensors of all experts, whose names have no suffix.
WHOLE: Final = {
    "ffn.gate_up.weight": "feed_forward.experts.gate_up_proj",
    "ffn.down.weight": "feed_forward.experts.down_proj",
}


def llama4(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Llama4ForCausalLM`."""
    if config.is_null("attention_chunk_size"):
        raise UnsupportedModel(
            "config.json: attention_chunk_size is null, but only chunks are implemented", field="attention_chunk_size"
        )
    config = config.filled(DEFAULTS)
    norm = RMSNorm(config.number("rms_norm_eps", 1e-5))
    activation, width = read_activation(config), config.integer("intermediate_size")
    experts = Experts(
        *read_counts(config, chosen=1),
        width,
        scoring="sigmoid",
        scaled_input=True,
        shared_width=width,
        activation=activation,
        transposed=not config.flag(LINEAR_EXPERTS, False),
        parameters="columns",
    )
    mlp = GatedMLP(config.integer("intermediate_size_mlp"), activation=activation)
    with_experts, mixers = read_expert_layers(config), _read_mixers(config)
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(
            LayerSpec(norm, mixer, experts if idx in with_experts else mlp) for idx, mixer in enumerate(mixers)
        ),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_position=read_max_position(config, None),
    )
    return spec, _map_weights(spec, config.flag("attention_bias", False))


def llama4_of_text_and_images(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read the language model of a `Llama4ForConditionalGeneration`, without the vision encoder."""
    config.require("tie_word_embeddings", None, False)
    text = text_config(config)
    spec, names = llama4(text.changed({LINEAR_EXPERTS: config.flag(LINEAR_EXPERTS, False)}))
    return spec, renamed_sources(names, "language_model.".__add__)


def _read_mixers(config: HFConfig) -> list[Attention]:
    """Read the attention of every layer: some have rotation and norms of heads, the others a temperature."""
    part = config.part("rope_parameters") or config.part("rope_scaling") or HFConfig({})
    for kind in ("rope_type", "type"):
        part.require(kind, None, *ROPE_TYPES)
    has_bias = config.flag("attention_bias", False)
    plain = replace(read_attention(config, None), qkv_bias=has_bias, output_bias=has_bias)
    turning = replace(plain, rope=replace(read_rope(config, 5e5), interleaved=True))
    if config.flag("use_qk_norm", True):
        turning = replace(turning, qk_norm=RMSNorm(config.number("rms_norm_eps", 1e-5), learned=False))
    if config.flag("attn_temperature_tuning", True):
        temperature = Temperature(config.number("floor_scale", 8192.0), config.number("attn_scale", 0.1))
        plain = replace(plain, temperature=temperature)
    turned, chunk = read_turned(config), config.integer("attention_chunk_size")
    kinds = read_layer_kinds(config, (FULL, CHUNKED), lambda idx: CHUNKED if turned[idx] else FULL)
    return [
        replace(turning if is_turned else plain, chunk=chunk if kind == CHUNKED else None)
        for kind, is_turned in zip(kinds, turned, strict=True)
    ]


def _map_weights(spec: ModelSpec, has_bias: bool) -> WeightMap:
    """Name the checkpoint's tensors."""
    names = map_ends(spec)
    for idx, layer in enumerate(spec.layers):
        layer_names = ours, theirs = f"layers.{idx}", f"model.layers.{idx}"
        names |= map_modules(*layer_names, {name: (norm,) for name, norm in NORMS.items()})
        names |= map_modules(*layer_names, {**QKV, **OUTPUT}, has_bias=has_bias)
        if isinstance(layer.ffn, Experts):
            names |= map_modules(*layer_names, EXPERTS)
            if layer.ffn.transposed:
                names |= {f"{ours}.{name}": (f"{theirs}.{tensor}",) for name, tensor in WHOLE.items()}
            else:
                names |= map_experts(f"{ours}.ffn", f"{theirs}.feed_forward", layer.ffn.num_experts)
        else:
            names |= map_modules(*layer_names, MLP)
    return names
