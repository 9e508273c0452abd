"""The layout of Llama and most other families: its fields and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from quire.errors import CheckpointError
from quire.models.families.hf_config import (
    FULL,
    HFConfig,
    read_activation,
    read_max_position,
    read_rope,
    refuse_layer_types,
)
from quire.models.specs.rotations import Rope
from quire.models.specs.spec import Attention, GatedMLP, LayerSpec, ModelSpec, RMSNorm, WeightMap

# A layer's norms: Quire's name -> the checkpoint's.
NORMS: Mapping[str, str] = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
# A layer's modules: Quire's name -> modules of the checkpoint.
QKV: Mapping[str, tuple[str, ...]] = {"mixer.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
OUTPUT: Mapping[str, tuple[str, ...]] = {"mixer.output": ("self_attn.o_proj",)}
MLP: Mapping[str, tuple[str, ...]] = {"ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "ffn.down": ("mlp.down_proj",)}
HEAD_NORMS: Mapping[str, tuple[str, ...]] = {
    "mixer.q_norm": ("self_attn.q_norm",),
    "mixer.k_norm": ("self_attn.k_norm",),
}


def read_llama_layout(
    config: HFConfig,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: Literal["heads", "joint"] | None = None,
    head_dim: int | None = None,
    windows: Sequence[int | None] | None = None,
    rope: Rope | None = None,
) -> tuple[ModelSpec, WeightMap]:
    """Read a decoder with layers of attention and gated MLP, each after a norm; only the layers' windows differ."""
    if windows is None:
        refuse_layer_types(config, FULL)
        windows = (None,) * config.integer("num_hidden_layers")
    # These are Llama's fields, which have no defined meaning in checkpoints of other families.
    config.require("attention_bias", None, qkv_bias and output_bias)
    config.require("mlp_bias", None, mlp_bias)
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6))
    config.require("final_logit_softcapping", None)
    attention = replace(
        read_attention(config, read_rope(config) if rope is None else rope, head_dim),
        qk_norm=None if qk_norm is None else norm,
        joint_qk_norm=qk_norm == "joint",
        qkv_bias=qkv_bias,
        output_bias=output_bias,
    )
    mlp = GatedMLP(config.integer("intermediate_size"), mlp_bias, read_activation(config))
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(LayerSpec(norm, replace(attention, window=window), mlp) for window in windows),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_position=read_max_position(config, attention.rope),
    )
    return spec, map_weights(spec)


def read_attention(
    config: HFConfig, rope: Rope | None, head_dim: int | None = None, *, has_soft_cap: bool = False
) -> Attention:
    """Read the attention of a layer."""
    if not has_soft_cap:
        config.require("attn_logit_softcapping", None)
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({num_kv_heads})",
            field="num_key_value_heads",
        )
    if config.has("head_dim") or head_dim is not None:
        head_dim = config.integer("head_dim", head_dim)
    else:
        head_dim, remainder = divmod(config.integer("hidden_size"), num_heads)
        if remainder:
            raise CheckpointError(
                "config.json: without head_dim, hidden_size must be a multiple of num_attention_heads", field="head_dim"
            )
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim must be even, got {head_dim}", field="head_dim")
    return Attention(num_heads, num_kv_heads, head_dim, rope)


def with_norm(spec: ModelSpec, norm: RMSNorm) -> ModelSpec:
    """Return a model with another norm before the halves of layers, and before the head."""
    return replace(spec, layers=tuple(replace(layer, norm=norm) for layer in spec.layers), norm=norm)


def map_weights(
    spec: ModelSpec,
    norms: Mapping[str, str] = NORMS,
    prefix: str = "model",
    mlp: Mapping[str, tuple[str, ...]] = MLP,
) -> WeightMap:
    """Name the checkpoint's tensors."""
    names = map_ends(spec, prefix)
    for idx, layer in enumerate(spec.layers):
        attention = layer.mixer
        assert isinstance(attention, Attention)
        assert isinstance(layer.ffn, GatedMLP)
        layer_names = f"layers.{idx}", f"{prefix}.layers.{idx}"
        names |= map_modules(*layer_names, {name: (norm,) for name, norm in norms.items()})
        names |= map_modules(*layer_names, QKV, has_bias=attention.qkv_bias)
        names |= map_modules(*layer_names, OUTPUT, has_bias=attention.output_bias)
        names |= map_modules(*layer_names, mlp, has_bias=layer.ffn.bias)
        if attention.qk_norm is not None:
            names |= map_modules(*layer_names, HEAD_NORMS)
    return names


def renamed_sources(names: WeightMap, rename: Callable[[str], str]) -> WeightMap:
    """Return a weight map whose tensors have other names in the checkpoint."""
    return {name: tuple(map(rename, sources)) for name, sources in names.items()}


def map_ends(spec: ModelSpec, prefix: str = "model", norm: str = "norm") -> WeightMap:
    """Name the tensors before the first layer and after the last."""
    names: WeightMap = {
        "embedding.weight": (f"{prefix}.embed_tokens.weight",),
        "norm.weight": (f"{prefix}.{norm}.weight",),
    }
    if not spec.tied_head:
        names["head.weight"] = ("lm_head.weight",)
    return names


def map_modules(ours: str, theirs: str, modules: Mapping[str, tuple[str, ...]], *, has_bias: bool = False) -> WeightMap:
    """Name the tensors of a layer's modules."""
    return {
        f"{ours}.{name}.{kind}": tuple(f"{theirs}.{part}.{kind}" for part in parts)
        for name, parts in modules.items()
        for kind in (("weight", "bias") if has_bias else ("weight",))
    }
