"""Qwen3.5 (dense, text): gated delta nets, and attention with output gates in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.errors import CheckpointError
from quire.models.families.hf_config import (
    FULL,
    HFConfig,
    read_layer_kinds,
    read_max_position,
    read_partial_rope,
    read_sections,
    text_config,
)
from quire.models.families.llama_layout import (
    HEAD_NORMS,
    MLP,
    NORMS,
    OUTPUT,
    QKV,
    map_ends,
    map_modules,
    read_attention,
)
from quire.models.specs.spec import (
    Attention,
    GatedDeltaNet,
    GatedMLP,
    ImageRows,
    LayerSpec,
    ModelSpec,
    RMSNorm,
    WeightMap,
)

RECURRENT: Final = "linear_attention"
# Axes of frequencies where a file states none, as in transformers.
SECTIONS: Final = (11, 11, 10)
# Values of fields that checkpoints leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DELTA_NET: Final = {
    "mixer.input": (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    ),
    "mixer.conv": ("linear_attn.conv1d",),
    "mixer.norm": ("linear_attn.norm",),
    "mixer.output": ("linear_attn.out_proj",),
}
# The head for multi-token prediction, whose names have the same prefix in every checkpoint.
MTP: Final = {
    "embedding_norm": ("pre_fc_norm_embedding",),
    "hidden_norm": ("pre_fc_norm_hidden",),
    "input": ("fc",),
    "norm": ("norm",),
}
HEADS: Final = {"mixer.A_log": "linear_attn.A_log", "mixer.dt_bias": "linear_attn.dt_bias"}


def qwen3_5(config: HFConfig, prefix: str = "model") -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen3_5ForCausalLM`."""
    config = config.filled(DEFAULTS)
    config.require("num_experts", 0)
    config.require("hidden_act", "silu")
    config.require("attn_output_gate", True)
    config.require("mamba_ssm_dtype", "float32")
    eps = config.number("rms_norm_eps", 1e-6)
    norm = RMSNorm(eps, zero_centred=True)
    has_bias = config.flag("attention_bias", False)
    attention = replace(
        read_attention(config, None), qk_norm=norm, qkv_bias=has_bias, output_bias=has_bias, output_gate=True
    )
    attention = replace(attention, rope=read_partial_rope(config, attention.head_dim, 0.25))
    net = _read_delta_net(config, RMSNorm(eps))
    interval = config.integer("full_attention_interval")
    kinds = read_layer_kinds(config, (FULL, RECURRENT), lambda idx: RECURRENT if (idx + 1) % interval else FULL)
    mlp = GatedMLP(config.integer("intermediate_size"))
    has_mtp = config.count("mtp_num_hidden_layers", 0) == 1 and not config.flag("mtp_use_dedicated_embeddings", False)
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(LayerSpec(norm, attention if kind == FULL else net, mlp) for kind in kinds),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_position=read_max_position(config, attention.rope),
        mtp=LayerSpec(norm, attention, mlp) if has_mtp else None,
    )
    return spec, _map_weights(spec, has_bias, prefix)


def qwen3_5_of_text_and_images(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read the language model of a `Qwen3_5ForConditionalGeneration`, without the vision encoder."""
    text = text_config(config)
    # `tie_word_embeddings` is a field of the outer object.
    is_tied = config.flag("tie_word_embeddings", False)
    spec, names = qwen3_5(text.changed({"tie_word_embeddings": is_tied}), "model.language_model")
    return replace(spec, image_rows=ImageRows(read_sections(text, SECTIONS, interleaved=True))), names


def _read_delta_net(config: HFConfig, norm: RMSNorm) -> GatedDeltaNet:
    """Read the heads of a recurrent layer."""
    num_key_heads, num_value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads must be a multiple of linear_num_key_heads ({num_key_heads}), got "
            f"{num_value_heads}",
            field="linear_num_value_heads",
        )
    return GatedDeltaNet(
        num_key_heads,
        num_value_heads,
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim", least=2),
        norm,
    )


def _map_weights(spec: ModelSpec, has_bias: bool, prefix: str) -> WeightMap:
    """Name the checkpoint's tensors."""
    names = map_ends(spec, prefix)
    layers = [(f"layers.{idx}", f"{prefix}.layers.{idx}", layer) for idx, layer in enumerate(spec.layers)]
    if spec.mtp is not None:
        layers.append(("mtp.layers.0", "mtp.layers.0", spec.mtp))
        names |= map_modules("mtp", "mtp", MTP)
    for ours, theirs, layer in layers:
        layer_names = ours, theirs
        names |= map_modules(*layer_names, {name: (norm,) for name, norm in NORMS.items()}) | map_modules(
            *layer_names, MLP
        )
        if isinstance(layer.mixer, Attention):
            names |= map_modules(*layer_names, {**QKV, **OUTPUT}, has_bias=has_bias) | map_modules(
                *layer_names, HEAD_NORMS
            )
        else:
            names |= map_modules(*layer_names, DELTA_NET)
            names |= {f"{ours}.{name}": (f"{theirs}.{tensor}",) for name, tensor in HEADS.items()}
    return names
