"""Gemma 3n (text): several hidden states of each token, per-layer inputs, shared keys and values, and sparse gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any, Final

from quire.models.families.gemma3 import NORMS, read_ropes
from quire.models.families.gemma4 import GATE, QUERIES, TOLD
from quire.models.families.hf_config import (
    FULL,
    WINDOWED,
    HFConfig,
    read_activation,
    read_layer_kinds,
    read_max_position,
    text_config,
)
from quire.models.families.layer_fields import read_sources
from quire.models.families.llama_layout import HEAD_NORMS, MLP, OUTPUT, QKV, map_ends, map_modules, read_attention
from quire.models.specs.spec import (
    AltUp,
    Attention,
    GatedMLP,
    LayerSpec,
    ModelSpec,
    PerLayerInputs,
    RMSNorm,
    WeightMap,
)

# Values of fields that checkpoints leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 15,
}
# The first layers whose gates are sparse, and the share of zeros, in models that do not state it.
NUM_SPARSE, SPARSITY = 10, 0.95
# Modules of a layer that update its hidden states.
ALT_UP: Final = {
    "alt_up.predict": ("altup.prediction_coefs",),
    "alt_up.correct": ("altup.correction_coefs",),
    "alt_up.router": ("altup.modality_router",),
    "alt_up.router_norm": ("altup.router_norm",),
    "alt_up.left": ("laurel.linear_left",),
    "alt_up.right": ("laurel.linear_right",),
    "alt_up.low_rank_norm": ("laurel.post_laurel_norm",),
}


def gemma3n(config: HFConfig, prefix: str = "model") -> tuple[ModelSpec, WeightMap]:
    """Read a `Gemma3nForCausalLM` whose tensors have a prefix; for errors, see `build`."""
    config = config.filled(DEFAULTS)
    config.require("attention_bias", False)
    config.require("altup_active_idx", None, 0)
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6), wide=True)
    activation = read_activation(config, "hidden_activation")
    widths = config.integers("intermediate_size", config.integer("num_hidden_layers"))
    mlps = [
        GatedMLP(width, activation=activation, cutoff=cutoff)
        for width, cutoff in zip(widths, _read_cutoffs(config), strict=True)
    ]
    mixers = _read_mixers(config, norm)
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(LayerSpec(norm, mixer, mlp, post_norm=norm) for mixer, mlp in zip(mixers, mlps, strict=True)),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_position=read_max_position(config, None),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_cap=config.number("final_logit_softcapping", 30.0),
        per_layer_inputs=PerLayerInputs(
            config.integer("vocab_size_per_layer_input"),
            config.integer("hidden_size_per_layer_input"),
            norm,
            activation,
        ),
        alt_up=AltUp(
            config.integer("altup_num_inputs", 4, least=2),
            config.integer("laurel_rank", 64),
            norm,
            config.flag("altup_correct_scale", True),
        ),
    )
    return spec, _map_weights(spec, prefix)


def gemma3n_of_text_and_images(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read the language model of a `Gemma3nForConditionalGeneration`, without the vision and audio encoders."""
    config.require("tie_word_embeddings", None, True)
    return gemma3n(text_config(config), "model.language_model")


def _read_mixers(config: HFConfig, norm: RMSNorm) -> list[Attention]:
    """Read the attention of every layer."""
    kinds = read_layer_kinds(config, (FULL, WINDOWED), lambda idx: WINDOWED if (idx + 1) % 5 else FULL)
    ropes = dict(zip((FULL, WINDOWED), read_ropes(config), strict=True))
    return [
        replace(
            read_attention(config, ropes[kind]),
            qk_norm=norm,
            value_norm=True,
            window=config.integer("sliding_window") if kind == WINDOWED else None,
            score_scale=1.0,
            source=source,
        )
        for kind, source in zip(kinds, read_sources(config, kinds), strict=True)
    ]


def _read_cutoffs(config: HFConfig) -> list[float | None]:
    """Read the cutoff of each layer's gates in standard deviations, from the share of zeros if gates are normal."""
    name, num_layers = "activation_sparsity_pattern", config.integer("num_hidden_layers")
    num_sparse = NUM_SPARSE if num_layers > NUM_SPARSE else 0
    default = (SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    shares = config.shares(name, num_layers) if config.has(name) else default
    return [NormalDist().inv_cdf(share) if share else None for share in shares]


def _map_weights(spec: ModelSpec, prefix: str) -> WeightMap:
    """Name the checkpoint's tensors."""
    assert spec.alt_up is not None
    names = map_ends(spec, prefix) | map_modules("per_layer_inputs", prefix, TOLD)
    for ours, theirs in (("begin", "altup_projections"), ("end", "altup_unembed_projections")):
        for idx in range(spec.alt_up.num_streams - 1):
            names[f"alt_up.{ours}.{idx}.weight"] = (f"{prefix}.{theirs}.{idx}.weight",)
    norms = {name: (norm,) for name, norm in NORMS.items()}
    for idx, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{idx}", f"{prefix}.layers.{idx}"
        is_own = isinstance(layer.mixer, Attention) and layer.mixer.source is None
        heads = [QKV, HEAD_NORMS] if is_own else [QUERIES]
        for modules in (norms, OUTPUT, MLP, GATE, ALT_UP, *heads):
            names |= map_modules(ours, theirs, modules)
        if spec.alt_up.has_output_scale:
            names[f"{ours}.alt_up.output_scale.weight"] = (f"{theirs}.altup.correct_output_scale",)
    return names
