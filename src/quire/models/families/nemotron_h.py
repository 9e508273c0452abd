"""Nemotron-H and Nemotron 3: Mamba 2, attention without positions, plain MLPs or experts, one of them in each layer."""

from __future__ import annotations

from typing import Final

from quire.errors import UnsupportedModel, shown
from quire.models.families.expert_layout import read_counts
from quire.models.families.hf_config import FULL, HFConfig, read_layer_kinds
from quire.models.families.llama_layout import map_modules, read_attention
from quire.models.families.mamba_layout import NO_LIMITS, map_mamba2
from quire.models.specs.spec import FFN, Attention, Experts, LayerSpec, Mamba2, ModelSpec, PlainMLP, RMSNorm, WeightMap

RECURRENT, MLP, EXPERTS = "linear_attention", "mlp", "moe"
# Kinds of layers in `hybrid_override_pattern`, and older names of `layers_block_type`.
PATTERN: Final = {"M": RECURRENT, "*": FULL, "-": MLP, "E": EXPERTS}
OLDER: Final = {"attention": FULL, "mamba": RECURRENT}
# Added to the sum by which the chosen scores are divided.
SUM_EPS: Final = 1e-20
ATTENTION: Final = {
    "mixer.qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "mixer.output": ("mixer.o_proj",),
}
PLAIN: Final = {"ffn.up": ("mixer.up_proj",), "ffn.down": ("mixer.down_proj",)}
ROUTED: Final = {
    "ffn.router": ("mixer.gate",),
    "ffn.shared.up": ("mixer.shared_experts.up_proj",),
    "ffn.shared.down": ("mixer.shared_experts.down_proj",),
}


def nemotron_h(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `NemotronHForCausalLM`, without its head for multi-token prediction.

    Source: arXiv 2504.03624.
    """
    for field, allowed in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu"), ("n_shared_experts", 1)):
        config.require(field, None, allowed)
    for field in ("attention_bias", "mamba_proj_bias", "residual_in_fp32", "tie_word_embeddings"):
        config.require(field, None, False)
    for field in ("sliding_window", "moe_latent_size"):
        config.require(field, None)
    kinds = _read_kinds(config)
    config = config.changed({"num_hidden_layers": len(kinds)})
    norm = RMSNorm(config.number("layer_norm_epsilon", 1e-5), wide=True)
    layer_of: dict[str, LayerSpec] = {}
    for kind in dict.fromkeys(kinds):
        if kind in (FULL, RECURRENT):
            head_dim = config.integer("attention_head_dim", 128)
            mixer = read_attention(config, None, head_dim) if kind == FULL else _read_mamba(config)
            layer_of[kind] = LayerSpec(norm, mixer, None)
        else:
            layer_of[kind] = LayerSpec(norm, None, _read_ffn(config, kind))
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(layer_of[kind] for kind in kinds),
        norm=norm,
        tied_head=False,
        max_position=config.integer("max_position_embeddings"),
    )
    return spec, _map_weights(spec)


def _read_kinds(config: HFConfig) -> tuple[str, ...]:
    """Read the kind of every layer, of which there are as many as are listed."""
    pattern = config.text("hybrid_override_pattern", "")
    unknown = next((mark for mark in pattern if mark not in PATTERN), None)
    if unknown is not None:
        raise UnsupportedModel(
            f"config.json: hybrid_override_pattern has {shown(unknown)}, but only {', '.join(map(repr, PATTERN))} are "
            "implemented",
            field="hybrid_override_pattern",
        )
    listed = config.texts("layers_block_type") or tuple(PATTERN[mark] for mark in pattern)
    changes = {"layer_types": [*listed], "num_hidden_layers": len(listed)}
    if not listed:
        changes = {}
    return read_layer_kinds(config.changed(changes), tuple(PATTERN.values()), lambda _: RECURRENT, OLDER)


def _read_mamba(config: HFConfig) -> Mamba2:
    """Read the heads of a recurrent layer, whose steps have no limits.

    `time_step_limit` states none in published checkpoints, as their own code has none. `time_step_min` is of the
    initial weights; transformers takes it as a limit of the steps of prompts, but not of decodes.
    """
    config.require("time_step_limit", *NO_LIMITS)
    has_bias = config.flag("use_bias", False)
    return Mamba2(
        config.integer("mamba_num_heads", 128),
        config.integer("mamba_head_dim", 64),
        config.integer("n_groups", 8),
        config.integer("ssm_state_size", 128),
        config.integer("conv_kernel", 4, least=2),
        RMSNorm(config.number("layer_norm_epsilon", 1e-5)),
        conv_bias=config.flag("use_conv_bias", True),
        input_bias=has_bias,
        output_bias=has_bias,
    )


def _read_ffn(config: HFConfig, kind: str) -> FFN:
    has_bias = config.flag("mlp_bias", False)
    if kind == MLP:
        return PlainMLP(config.integer("intermediate_size", 21504), "relu2", has_bias)
    for field in ("n_group", "topk_group"):
        config.require(field, None, 1)
    config.require("mlp_bias", None, False)
    is_normed = config.flag("norm_topk_prob", True)
    return Experts(
        *read_counts(config.changed({"num_experts": config.integer("n_routed_experts", 8)}), chosen=2),
        config.integer("moe_intermediate_size", 7688),
        scoring="sigmoid",
        renormalised=is_normed,
        shared_width=config.integer("moe_shared_expert_intermediate_size", 7688),
        choice_bias=True,
        sum_eps=SUM_EPS if is_normed else 0.0,
        score_scale=config.number("routed_scaling_factor", 1.0),
        plain="relu2",
    )


def _map_weights(spec: ModelSpec) -> WeightMap:
    """Name the checkpoint's tensors."""
    names: WeightMap = {
        "embedding.weight": ("backbone.embeddings.weight",),
        "norm.weight": ("backbone.norm_f.weight",),
        "head.weight": ("lm_head.weight",),
    }
    for idx, layer in enumerate(spec.layers):
        layer_names = ours, theirs = f"layers.{idx}", f"backbone.layers.{idx}"
        half = "mixer" if layer.ffn is None else "ffn"
        names[f"{ours}.{half}_norm.weight"] = (f"{theirs}.norm.weight",)
        if isinstance(layer.mixer, Attention):
            names |= map_modules(*layer_names, ATTENTION)
        elif isinstance(layer.mixer, Mamba2):
            names |= map_mamba2(f"{ours}.mixer", f"{theirs}.mixer", layer.mixer)
        elif isinstance(layer.ffn, PlainMLP):
            names |= map_modules(*layer_names, PLAIN, has_bias=layer.ffn.bias)
        elif isinstance(layer.ffn, Experts):
            names |= map_modules(*layer_names, ROUTED)
            names[f"{ours}.ffn.choice_bias.weight"] = (f"{theirs}.mixer.gate.e_score_correction_bias",)
            for part, source in (("gate_up", "up_proj"), ("down", "down_proj")):
                experts = range(layer.ffn.num_experts)
                names[f"{ours}.ffn.{part}.weight"] = tuple(
                    f"{theirs}.mixer.experts.{number}.{source}.weight" for number in experts
                )
    return names
