"""Llama 4 (text), with the chunks, temperatures and layers without rotation of the published models."""

from __future__ import annotations

from typing import Final

from quire.models.families.expert_layout import LINEAR_EXPERTS
from quire.models.gguf.architectures.common import ATTENTION, ENDS, NORMS, has_tensor, layers_with, read_common
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, Config, Floats, Shapes

LAYER: Final = {
    **ATTENTION,
    **NORMS,
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
    "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
    "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
    "feed_forward.experts.gate_proj": "ffn_gate_exps",
    "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
}
# Number of experts of the only published model without norms of queries and keys.
NUM_EXPERTS_MAVERICK: Final = 128
# Parameters that files lack; these are the values of the published models.
PUBLISHED: Final = {
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}


def _read(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    reads = ("expert_count", "expert_shared_count", "expert_gating_func")
    config = read_common(metadata, shapes, "Llama4ForCausalLM", floats, reads=reads)
    metadata.require("rope.dimension_count", config["head_dim"])
    for name in ("attention.sliding_window", "attention.chunk_size"):
        metadata.require(name, PUBLISHED["attention_chunk_size"])
    metadata.require("attention.sliding_window_pattern", PUBLISHED["no_rope_layer_interval"])
    has_experts = layers_with(shapes, config["num_hidden_layers"], "ffn_gate_inp.weight")
    num_experts = metadata.integer("expert_count")
    return (
        config
        | PUBLISHED
        | {
            "intermediate_size": metadata.integer("expert_feed_forward_length"),
            "intermediate_size_mlp": metadata.same_integer("feed_forward_length"),
            "num_local_experts": num_experts,
            "num_experts_per_tok": metadata.integer("expert_used_count"),
            "moe_layers": [idx for idx, has in enumerate(has_experts) if has],
            "use_qk_norm": metadata.flag("use_qk_norm", num_experts != NUM_EXPERTS_MAVERICK),
            "attention_bias": has_tensor(shapes, "attn_q.bias"),
            LINEAR_EXPERTS: True,
        }
    )


# Queries and keys have the family's order, since the family pairs neighbours too.
LLAMA4: Final = {"llama4": Architecture(_read, LAYER, ENDS)}
