"""LFM2, without and with experts: the layers without KV heads are short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.models.families.hf_config import FULL
from quire.models.families.lfm2 import CONV
from quire.models.gguf.architectures.common import (
    ATTENTION,
    ENDS,
    SIGMOID,
    expert_names,
    has_tensor,
    read_common,
    read_experts,
)
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, Change, Config, Floats, Shapes

LAYER: Final = {
    **ATTENTION,
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}
EXPERTS: Final = {
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    **expert_names("feed_forward.experts", ("w1", "w3", "w2")),
}


def _read(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    return _read_layers(metadata, shapes, read_common(metadata, shapes, "Lfm2ForCausalLM", floats))


def _read_moe(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    reads = ("expert_count", "expert_gating_func", "expert_weights_scale")
    config = read_common(metadata, shapes, "Lfm2MoeForCausalLM", floats, reads=reads)
    metadata.require("expert_gating_func", SIGMOID)
    num_layers = config["num_hidden_layers"]
    first = metadata.integer("leading_dense_block_count", 0, least=0, most=num_layers - 1)
    return (
        _read_layers(metadata, shapes, config)
        | read_experts(metadata, shapes)
        | {
            "num_dense_layers": first,
            "norm_topk_prob": metadata.flag("expert_weights_norm", True),
            "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
            "use_expert_bias": has_tensor(shapes, "exp_probs_b.bias"),
        }
    )


def _read_layers(metadata: Metadata, shapes: Shapes, config: Config) -> Config:
    """Read the fields of models without and with experts."""
    metadata.require("rope.dimension_count", config["head_dim"])
    kv_heads = metadata.integers("attention.head_count_kv")
    if len({*kv_heads} - {0}) != 1:
        raise metadata.wrong("attention.head_count_kv", [*kv_heads], "0 or one other number in each layer")
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "intermediate_size": metadata.same_integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if num_heads else CONV for num_heads in kv_heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": has_tensor(shapes, "shortconv.conv.bias"),
    }


def _changes(_config: Config) -> Mapping[str, Change]:
    return {"conv.conv.weight": Change(layout="unsqueeze_1")}


# The final norm has the name of an embedding norm.
LFM2_ENDS: Final = ENDS | {"model.embedding_norm.weight": "token_embd_norm.weight"}
LFM2: Final = {
    "lfm2": Architecture(_read, LAYER, LFM2_ENDS, _changes),
    "lfm2moe": Architecture(_read_moe, LAYER | EXPERTS, LFM2_ENDS, _changes),
}
