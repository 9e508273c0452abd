"""GPT-2: learned positions, layer norms and plain MLPs, with biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from quire.errors import UnsupportedModel, shown
from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import map_modules, read_attention
from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.spec import LayerSpec, ModelSpec, PlainMLP, WeightMap

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface.ops import Elementwise

# GPT-2's names of fields.
NAMES: Final[Mapping[str, str]] = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# Values of fields that checkpoints leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "max_position_embeddings": 1024,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
}
ACTIVATIONS: Final[Mapping[str, Elementwise]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Endings of the names of matrices that folders store as [in, out]; see `quire.models.checkpoints.columns`.
COLUMNS: Final = (".c_attn.weight", ".c_fc.weight", ".c_proj.weight")
MODULES: Final = {
    "mixer_norm": ("ln_1",),
    "mixer.qkv": ("attn.c_attn",),
    "mixer.output": ("attn.c_proj",),
    "ffn_norm": ("ln_2",),
    "ffn.up": ("mlp.c_fc",),
    "ffn.down": ("mlp.c_proj",),
}


def gpt2(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `GPT2LMHeadModel`; for errors, see `build`.

    `reorder_and_upcast_attn` scales keys before products, in float32: it changes the rounding alone.

    Source: GPT-2, Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    """
    # Fields of other families have no meaning here.
    config = config.renamed(NAMES).filled(DEFAULTS).changed({"num_key_value_heads": None, "head_dim": None})
    width, num_positions = config.integer("hidden_size"), config.integer("max_position_embeddings")
    attention = replace(read_attention(config, None), qkv_bias=True, output_bias=True)
    scale = attention.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    is_by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    scales = [scale / (idx + 1 if is_by_layer else 1) for idx in range(config.integer("num_hidden_layers"))]
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5))
    mlp = PlainMLP(config.integer("n_inner", 4 * width), _read_activation(config), bias=True)
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=width,
        layers=tuple(LayerSpec(norm, replace(attention, score_scale=scale), mlp) for scale in scales),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_position=num_positions,
        num_positions=num_positions,
    )
    return spec, _map_weights(spec)


def _read_activation(config: HFConfig) -> Elementwise:
    value = config.text("activation_function", "gelu_new")
    if value not in ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json: activation_function is {shown(value)}, but only {', '.join(map(repr, ACTIVATIONS))} are "
            "implemented",
            field="activation_function",
        )
    return ACTIVATIONS[value]


def _map_weights(spec: ModelSpec) -> WeightMap:
    """Name the checkpoint's tensors."""
    names: WeightMap = {
        "embedding.weight": ("transformer.wte.weight",),
        "positions.weight": ("transformer.wpe.weight",),
        "norm.weight": ("transformer.ln_f.weight",),
        "norm.bias": ("transformer.ln_f.bias",),
    }
    if not spec.tied_head:
        names["head.weight"] = ("lm_head.weight",)
    for idx in range(len(spec.layers)):
        names |= map_modules(f"layers.{idx}", f"transformer.h.{idx}", MODULES, has_bias=True)
    return names
