"""Gemma 4 (text): layers that share keys and values, and per-layer inputs.

In its models with experts, each layer has experts and a gated MLP side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.errors import CheckpointError
from quire.models.families.expert_layout import LINEAR_EXPERTS, map_experts, map_stack, read_counts
from quire.models.families.gemma3 import NORMS
from quire.models.families.hf_config import (
    FULL,
    WINDOWED,
    HFConfig,
    read_activation,
    read_layer_kinds,
    read_max_position,
    read_rope_part,
    text_config,
)
from quire.models.families.layer_fields import read_layers, read_sources
from quire.models.families.llama_layout import HEAD_NORMS, MLP, OUTPUT, QKV, map_ends, map_modules, read_attention
from quire.models.specs.rotations import ProportionalScaling, Rope
from quire.models.specs.spec import (
    Attention,
    Experts,
    GatedMLP,
    LayerSpec,
    MLPBesideExperts,
    ModelSpec,
    PerLayerInputs,
    RMSNorm,
    WeightMap,
)

# Values of fields that checkpoints leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
ROPES: Final = {FULL: Rope(1e6, ProportionalScaling(0.25, 1.0)), WINDOWED: Rope(1e4)}
# Modules of a layer that add per-layer inputs, and modules that compute these inputs.
GATE: Final = {
    "per_layer_gate.gate": ("per_layer_input_gate",),
    "per_layer_gate.output": ("per_layer_projection",),
    "per_layer_gate.output.norm": ("post_per_layer_input_norm",),
}
TOLD: Final = {
    "embedding": ("embed_tokens_per_layer",),
    "projection": ("per_layer_model_projection",),
    "norm": ("per_layer_projection_norm",),
}
# Modules of layers with experts; the norm of other layers' MLP output is the norm of the sum of both outputs here.
MLP_BESIDE: Final = {f"ffn.mlp.{name.removeprefix('ffn.')}": modules for name, modules in MLP.items()}
EXPERTS: Final = {
    "ffn.mlp_norm": ("post_feedforward_layernorm_1",),
    "ffn.experts_input_norm": ("pre_feedforward_layernorm_2",),
    "ffn.experts_norm": ("post_feedforward_layernorm_2",),
    "ffn.norm": ("post_feedforward_layernorm",),
    "ffn.experts.router": ("router.proj",),
}
# Weights of the router, whose names have no suffix.
ROUTER: Final = {"router_norm": "router.scale", "expert_scales": "router.per_expert_scale"}
QUERIES: Final = {"mixer.q": ("self_attn.q_proj",), "mixer.q_norm": ("self_attn.q_norm",)}
SAME_KV: Final = {"mixer.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.k_proj")}


def gemma4(config: HFConfig, prefix: str = "model") -> tuple[ModelSpec, WeightMap]:
    """Read a `Gemma4ForCausalLM` whose tensors have a prefix; for errors, see `build`."""
    config = config.filled(DEFAULTS)
    config.require("use_bidirectional_attention", None, "vision")  # within images, which are refused at the door
    config.require("attention_bias", False)
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6), wide=True)
    mixers = _read_mixers(config, norm)
    mlp = GatedMLP(config.integer("intermediate_size"), activation=read_activation(config, "hidden_activation"))
    is_double = config.flag("use_double_wide_mlp", False)
    wide_mlp = replace(mlp, width=2 * mlp.width) if is_double else mlp
    experts = _read_experts(config, norm, mlp) if config.flag("enable_moe_block", False) else None

    def ffn_of(mixer: Attention) -> GatedMLP | MLPBesideExperts:
        layer_mlp = mlp if mixer.source is None else wide_mlp
        return layer_mlp if experts is None else MLPBesideExperts(layer_mlp, experts, norm)

    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(LayerSpec(norm, mixer, ffn_of(mixer), post_norm=norm, learned_scale=True) for mixer in mixers),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_position=read_max_position(config, None),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_cap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
        per_layer_inputs=_read_per_layer_inputs(config, norm, mlp),
    )
    names = _map_weights(spec, config.flag("attention_k_eq_v", False), prefix)
    if experts is not None:
        for idx in range(len(mixers)):
            ours, theirs = f"layers.{idx}.ffn.experts", f"{prefix}.layers.{idx}"
            names |= {f"{ours}.{name}.weight": (f"{theirs}.{tensor}",) for name, tensor in ROUTER.items()}
            is_linear = config.flag(LINEAR_EXPERTS, False)
            names |= map_experts(ours, theirs, experts.num_experts) if is_linear else map_stack(ours, theirs)
    return spec, names


def gemma4_of_text_and_images(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read the language model of a `Gemma4ForConditionalGeneration`, without the vision and audio encoders."""
    config.require("tie_word_embeddings", None, True)
    text = text_config(config)
    return gemma4(text.changed({LINEAR_EXPERTS: config.flag(LINEAR_EXPERTS, False)}), "model.language_model")


def _read_experts(config: HFConfig, norm: RMSNorm, mlp: GatedMLP) -> Experts:
    """Read the experts of every layer; their router's input is the residual after an RMS norm."""
    return Experts(
        *read_counts(config.changed({"num_experts_per_tok": config.integer("top_k_experts")})),
        config.integer("moe_intermediate_size"),
        renormalised=True,
        activation=mlp.activation,
        expert_scales=True,
        router_norm=norm,
        logit_scale=config.integer("hidden_size") ** -0.5,
    )


def _read_kinds(config: HFConfig) -> tuple[str, ...]:
    """Read the kind of every layer; the last layer always has full attention."""
    kinds = read_layer_kinds(config, (FULL, WINDOWED), lambda idx: WINDOWED if (idx + 1) % 6 else FULL)
    return (*kinds[:-1], FULL)


def _read_mixers(config: HFConfig, norm: RMSNorm) -> list[Attention]:
    """Read the attention of every layer."""
    kinds, ropes = _read_kinds(config), _read_ropes(config)
    mixers: list[Attention] = []
    for kind, layer, source in zip(kinds, read_layers(config, kinds), read_sources(config, kinds), strict=True):
        mixer = replace(
            read_attention(layer, ropes[kind]),
            qk_norm=norm,
            value_norm=True,
            window=config.integer("sliding_window") if kind == WINDOWED else None,
            score_scale=1.0,
        )
        if source is not None and mixers[source].cache != mixer.cache:
            raise CheckpointError(
                f"config.json: layer {len(mixers)} reads keys and values of layer {source}, but per_layer_config "
                "states another shape for one of them",
                field="per_layer_config",
            )
        mixers.append(replace(mixer, source=source))
    return mixers


def _read_ropes(config: HFConfig) -> Mapping[str, Rope]:
    """Read the rotation of each kind of layer."""
    parts = config.part("rope_parameters") or HFConfig({})
    parts.require("rope_type", None)
    stated = {kind: parts.part(kind) for kind in ROPES}
    return ROPES | {kind: read_rope_part(config, part, 1e4) for kind, part in stated.items() if part is not None}


def _read_per_layer_inputs(config: HFConfig, norm: RMSNorm, mlp: GatedMLP) -> PerLayerInputs | None:
    """Read the per-layer inputs; None if their width is 0."""
    if config.count("hidden_size_per_layer_input", 0) == 0:
        return None
    vocab_size = config.integer("vocab_size_per_layer_input")
    if vocab_size < config.integer("vocab_size"):
        raise CheckpointError(
            f"config.json: vocab_size_per_layer_input must be at least vocab_size ({config.integer('vocab_size')}), "
            f"got {vocab_size}",
            field="vocab_size_per_layer_input",
        )
    return PerLayerInputs(vocab_size, config.integer("hidden_size_per_layer_input"), norm, mlp.activation)


def _map_weights(spec: ModelSpec, is_kv_same: bool, prefix: str) -> WeightMap:
    """Name the checkpoint's tensors."""
    names = map_ends(spec, prefix)
    if spec.per_layer_inputs is not None:
        names |= map_modules("per_layer_inputs", prefix, TOLD)
    for idx, layer in enumerate(spec.layers):
        attention = layer.mixer
        assert isinstance(attention, Attention)
        ours, theirs = f"layers.{idx}", f"{prefix}.layers.{idx}"
        norms = {name: (norm,) for name, norm in NORMS.items()}
        parts: list[Mapping[str, tuple[str, ...]]] = [norms, OUTPUT]
        if isinstance(layer.ffn, MLPBesideExperts):
            del norms["ffn.down.norm"]
            parts += [MLP_BESIDE, EXPERTS]
        else:
            parts.append(MLP)
        if attention.source is not None:
            parts.append(QUERIES)
        else:
            parts += [SAME_KV if is_kv_same and attention.window is None else QKV, HEAD_NORMS]
        if spec.per_layer_inputs is not None:
            parts.append(GATE)
        for modules in parts:
            names |= map_modules(ours, theirs, modules)
        names[f"{ours}.scale.weight"] = (f"{theirs}.layer_scalar",)
    return names
