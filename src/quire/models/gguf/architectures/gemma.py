"""Gemma to Gemma 4, and Gemma 3n (text)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Final

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.families.hf_config import FULL, WINDOWED
from quire.models.gguf.architectures.common import (
    ATTENTION,
    ENDS,
    FREQUENCY_FACTORS,
    LLAMA,
    MLP,
    expert_names,
    has_tensor,
    layers_with,
    matrix_shape,
    read_common,
    read_dense,
    read_experts,
    read_floats,
    whole_layers,
)
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, Change, Config, Floats, Shapes

LAYER: Final = {
    **ATTENTION,
    **MLP,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GATE: Final = {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
GEMMA3N_LAYER: Final = {
    **LAYER,
    **GATE,
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
GEMMA4_LAYER: Final = {
    **LAYER,
    **GATE,
    "layer_scalar": "layer_output_scale.weight",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **expert_names("experts"),
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
GEMMA4_ENDS: Final = {
    **ENDS,
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
# Projections of all hidden states but the first, which are stacked; see `_gemma3n_renamed`.
GEMMA3N_ENDS: Final = {
    **GEMMA4_ENDS,
    "model.altup_projections.weight": "altup_proj.weight",
    "model.altup_unembed_projections.weight": "altup_unembd_proj.weight",
}
# The norms of Gemma to Gemma 3, whose weights are stored plus one.
NORMS: Final = (
    "model.norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
# Number of layers of the 27B models, which scale scores by the hidden size per head instead of the head dim.
NUM_LAYERS_27B: Final = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
# Gemma 2's soft caps, which have the same names in a config.json.
CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")
# Smallest factor of wavelengths of pairs that are not rotated.
UNTURNED: Final = 1e20
_PROJECTION: Final = re.compile(r"(model\.altup_(?:unembed_)?projections)\.(\d+)\.weight")


def _read_gemma(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    bias = {"attention_bias": has_tensor(shapes, "attn_q.bias")}
    return read_dense(metadata, shapes, "GemmaForCausalLM", floats) | bias


def _read_gemma2(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    config = read_common(metadata, shapes, "Gemma2ForCausalLM", floats, reads=CAPS)
    return (
        config
        | whole_layers(metadata, config["head_dim"])
        | {name: metadata.number(name) for name in CAPS if metadata.has(name)}
        | {
            "layer_types": _kinds(metadata.window_pattern(2)),
            "sliding_window": metadata.integer("attention.sliding_window"),
            "query_pre_attn_scalar": _query_scalar(config),
        }
    )


def _query_scalar(config: Config) -> int:
    """Return the number by whose square root scores are divided."""
    is_27b = config["num_hidden_layers"] == NUM_LAYERS_27B[config["architectures"][0]]
    scalar: int = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return scalar


def _read_gemma3(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    config = read_common(metadata, shapes, "Gemma3ForCausalLM", floats, reads=("final_logit_softcapping",))
    window = metadata.integer("attention.sliding_window", 0, least=0)
    return (
        config
        | whole_layers(metadata, config["head_dim"])
        | _cap(metadata)
        | {
            "layer_types": _kinds(metadata.window_pattern(6 if window else 1)),
            "sliding_window": window or None,
            "query_pre_attn_scalar": _query_scalar(config),
            "rope_parameters": {FULL: config["rope_parameters"], WINDOWED: _window_rope(metadata)},
        }
    )


def _read_gemma3n(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    config = read_common(metadata, shapes, "Gemma3nForCausalLM", floats, reads=("final_logit_softcapping",))
    metadata.require("altup.active_idx", 0)
    metadata.require("rope.dimension_count", config["head_dim"])
    metadata.same_integer("attention.head_count_kv")
    num_layers = config["num_hidden_layers"]
    return (
        config
        | _cap(metadata)
        | {
            "intermediate_size": [*metadata.integers("feed_forward_length")],
            "layer_types": _kinds(metadata.window_pattern(5)),
            "sliding_window": metadata.integer("attention.sliding_window"),
            "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers", 0, least=0, most=num_layers),
            "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input"),
            "vocab_size_per_layer_input": matrix_shape(shapes, "per_layer_token_embd.weight")[0],
            "altup_num_inputs": metadata.integer("altup.num_inputs"),
            "altup_correct_scale": has_tensor(shapes, "altup_correct_scale.weight"),
            "laurel_rank": matrix_shape(shapes, "blk.0.laurel_l.weight")[0],
            "activation_sparsity_pattern": _sparsity(metadata, num_layers),
            "rope_parameters": {FULL: config["rope_parameters"], WINDOWED: _window_rope(metadata)},
        }
    )


def _sparsity(metadata: Metadata, num_layers: int) -> list[float]:
    """Return the share of zeros among the gates of each layer, of which a file has the cutoff in deviations."""
    cutoffs = metadata.numbers("activation_sparsity_scale", num_layers)
    return [round(NormalDist().cdf(cutoff), 6) if cutoff > -math.inf else 0.0 for cutoff in cutoffs]


def _gemma3n_renamed(_config: Config, name: str) -> str:
    """Return the name of a projection of a hidden state as that of one of the experts of a stack."""
    return _PROJECTION.sub(r"\1.experts.\2.weight", name)


def _read_gemma4(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    reads = ("final_logit_softcapping", "expert_count", FREQUENCY_FACTORS)
    config = read_common(metadata, shapes, "Gemma4ForCausalLM", floats, reads=reads)
    pattern, num_layers = metadata.window_pattern(6), config["num_hidden_layers"]
    if pattern[-1]:
        raise metadata.wrong("attention.sliding_window_pattern", [*pattern], "without a window in the last layer")
    head_dim, width = config["head_dim"], metadata.integer("embedding_length_per_layer_input", 0, least=0)
    theta = config["rope_parameters"]["rope_theta"]
    fraction = _turned_fraction(shapes, head_dim, floats) if FREQUENCY_FACTORS in shapes else 1.0
    scaling = {"rope_type": "proportional", "partial_rotary_factor": fraction}
    config |= {
        "layer_types": _kinds(pattern),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers", 0, least=0, most=num_layers),
        "head_dim": metadata.integer("attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "hidden_size_per_layer_input": width,
        "rope_parameters": {FULL: {"rope_theta": theta} | scaling, WINDOWED: _window_rope(metadata)},
    }
    metadata.require("rope.dimension_count", head_dim)
    metadata.require("rope.dimension_count_swa", config["head_dim"])
    if width:
        config["vocab_size_per_layer_input"] = matrix_shape(shapes, "per_layer_token_embd.weight")[0]
    if metadata.integer("expert_count", 0, least=0):
        experts = read_experts(metadata, shapes)
        config |= experts | {"enable_moe_block": True, "top_k_experts": experts["num_experts_per_tok"]}
    return config | _cap(metadata) | _kv_heads(metadata, shapes, pattern) | _mlp_widths(metadata, config)


def _kv_heads(metadata: Metadata, shapes: Shapes, pattern: tuple[bool, ...]) -> Config:
    """Read the numbers of KV heads, and whether global layers share one projection for keys and values."""
    name = "attention.head_count_kv"
    counts = metadata.integers(name)
    near = {count for count, has_window in zip(counts, pattern, strict=True) if has_window}
    far = {count for count, has_window in zip(counts, pattern, strict=True) if not has_window}
    has_keys = layers_with(shapes, len(counts), "attn_k.weight")
    has_values = layers_with(shapes, len(counts), "attn_v.weight")
    is_same = any(keys and not values for keys, values in zip(has_keys, has_values, strict=True))
    if len(near) > 1 or len(far) > 1 or (near and near != far and not is_same):
        raise UnsupportedModel(
            f"the field {metadata.key(name)} must be one number for all layers, or with shared keys and values one for "
            "those with a window and one for the others",
            field=metadata.key(name),
        )
    return {
        "attention_k_eq_v": is_same,
        "num_key_value_heads": max(near or far),
        "num_global_key_value_heads": max(far) if is_same else None,
    }


def _mlp_widths(metadata: Metadata, config: Config) -> Config:
    """Read the width of gated MLPs, which may be doubled in layers that share the KV cache of another layer."""
    widths = metadata.integers("feed_forward_length")
    num_own = len(widths) - config["num_kv_shared_layers"]
    is_double = widths[-1] == 2 * widths[0] and 0 < num_own < len(widths)
    expected = [widths[0]] * num_own + [widths[0] * (1 + is_double)] * (len(widths) - num_own)
    if [*widths] != expected:
        raise UnsupportedModel(
            f"the field {metadata.key('feed_forward_length')} must be the same in all layers, or twice that in those "
            "of shared_kv_layers",
            field=metadata.key("feed_forward_length"),
        )
    return {"intermediate_size": widths[0], "use_double_wide_mlp": is_double}


def _turned_fraction(shapes: Shapes, head_dim: int, floats: Floats | None) -> float:
    """Return the fraction of a head's pairs that are rotated: the first ones, whose factors are 1."""
    factors = read_floats(shapes, floats, FREQUENCY_FACTORS, head_dim // 2)
    num_turned = sum(factor == 1.0 for factor in factors)
    ends = factors[num_turned:]
    if not num_turned or factors[:num_turned] != [1.0] * num_turned or not all(factor >= UNTURNED for factor in ends):
        raise CheckpointError(
            f"the tensor {FREQUENCY_FACTORS} must be ones, and then at least {UNTURNED:g}", field=FREQUENCY_FACTORS
        )
    fraction = 2 * num_turned / head_dim
    return fraction if int(fraction * head_dim // 2) == num_turned else math.nextafter(fraction, 1.0)


def _window_rope(metadata: Metadata) -> Config:
    return {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}


def _cap(metadata: Metadata) -> Config:
    name = "final_logit_softcapping"
    return {name: metadata.number(name)} if metadata.has(name) else {}


def _kinds(pattern: tuple[bool, ...]) -> list[str]:
    return [WINDOWED if has_window else FULL for has_window in pattern]


def _norm_changes(_config: Config) -> Mapping[str, Change]:
    return dict.fromkeys(NORMS, Change(transform="minus_one"))


GEMMA: Final[dict[str, Architecture]] = {
    "gemma": Architecture(_read_gemma, LLAMA, ENDS, _norm_changes),
    "gemma2": Architecture(_read_gemma2, LAYER, ENDS, _norm_changes),
    "gemma3": Architecture(_read_gemma3, LAYER, ENDS, _norm_changes),
    "gemma3n": Architecture(_read_gemma3n, GEMMA3N_LAYER, GEMMA3N_ENDS, renamed=_gemma3n_renamed),
    "gemma4": Architecture(_read_gemma4, GEMMA4_LAYER, GEMMA4_ENDS),
}
