"""The layout that Llama introduced and most families keep: how it is read, and what its tensors are called."""

from __future__ import annotations

from quire.errors import CheckpointError
from quire.models.families.hf_config import HFConfig, read_max_position, read_rope, refuse_layer_types
from quire.models.spec import Attention, GatedMLP, LayerSpec, ModelSpec, RMSNorm, WeightMap


def read_llama_layout(
    config: HFConfig,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
) -> tuple[ModelSpec, WeightMap]:
    """Read a decoder of equal layers, each attention and gated MLP behind a norm.

    Args:
        qkv_bias, output_bias, mlp_bias, qk_norm: what the family adds to Llama.
        head_dim: where the configuration gives none; None divides the width among the heads.

    Raises:
        CheckpointError: a field is missing or of the wrong type, or the heads do not divide.
        UnsupportedModel: a field asks for something that is not implemented.
    """
    refuse_layer_types(config)
    # These fields are Llama's; where another family's checkpoint sets them, we would not know what it means.
    config.require("attention_bias", None, qkv_bias and output_bias)
    config.require("mlp_bias", None, mlp_bias)
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6))
    attention = _read_attention(
        config, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=norm if qk_norm else None, head_dim=head_dim
    )
    mlp = GatedMLP(config.integer("intermediate_size"), bias=mlp_bias)
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=(LayerSpec(norm, attention, mlp),) * config.integer("num_hidden_layers"),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_position=read_max_position(config, attention.rope),
    )
    return spec, _weight_map(spec)


def _read_attention(
    config: HFConfig, *, qkv_bias: bool, output_bias: bool, qk_norm: RMSNorm | None, head_dim: int | None
) -> Attention:
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
        head_dim, rest = divmod(config.integer("hidden_size"), num_heads)
        if rest:
            raise CheckpointError(
                "config.json: without head_dim, hidden_size must be a multiple of num_attention_heads", field="head_dim"
            )
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim must be even, got {head_dim}", field="head_dim")
    return Attention(num_heads, num_kv_heads, head_dim, read_rope(config), qk_norm, qkv_bias, output_bias)


def _weight_map(spec: ModelSpec) -> WeightMap:
    names: WeightMap = {"embedding.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
    if not spec.tied_head:
        names["head.weight"] = ("lm_head.weight",)
    for idx, layer in enumerate(spec.layers):
        attention, mlp_bias = layer.mixer, layer.ffn.bias
        ours, theirs = f"layers.{idx}", f"model.layers.{idx}"
        names[f"{ours}.mixer_norm.weight"] = (f"{theirs}.input_layernorm.weight",)
        names[f"{ours}.ffn_norm.weight"] = (f"{theirs}.post_attention_layernorm.weight",)
        projections = (
            ("mixer.qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), attention.qkv_bias),
            ("mixer.output", "self_attn", ("o_proj",), attention.output_bias),
            ("ffn.gate_up", "mlp", ("gate_proj", "up_proj"), mlp_bias),
            ("ffn.down", "mlp", ("down_proj",), mlp_bias),
        )
        for name, home, parts, has_bias in projections:
            for kind in ("weight", "bias") if has_bias else ("weight",):
                names[f"{ours}.{name}.{kind}"] = tuple(f"{theirs}.{home}.{part}.{kind}" for part in parts)
        if attention.qk_norm is not None:
            for name in ("q_norm", "k_norm"):
                names[f"{ours}.mixer.{name}.weight"] = (f"{theirs}.self_attn.{name}.weight",)
    return names
