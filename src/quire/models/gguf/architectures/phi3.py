"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, and tensors with the factors of LongRoPE."""

from __future__ import annotations

from typing import Final

from quire.models.gguf.architectures.common import ENDS, NORMS, read_common, read_floats, turned_fraction
from quire.models.gguf.architectures.metadata import Metadata, shortest
from quire.models.gguf.architectures.sources import Architecture, Config, Floats, Shapes

LAYER: Final = {
    **NORMS,
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FACTORS: Final = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
ATTENTION_FACTOR: Final = "rope.scaling.attn_factor"


def _read(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    has_factors = FACTORS["long_factor"] in shapes
    reads = (ATTENTION_FACTOR, "rope.scaling.type") if has_factors else ()
    config = read_common(metadata, shapes, "Phi3ForCausalLM", floats, reads=reads)
    head_dim = config["head_dim"]
    rope = config["rope_parameters"] | {"partial_rotary_factor": turned_fraction(metadata, head_dim)}
    if has_factors:
        metadata.require("rope.scaling.type", "none", "longrope")
        num_factors = metadata.integer("rope.dimension_count", most=head_dim) // 2
        rope |= {"rope_type": "longrope", "attention_factor": metadata.number(ATTENTION_FACTOR, 1.0)}
        for name, tensor in FACTORS.items():
            rope[name] = [shortest(value) for value in read_floats(shapes, floats, tensor, num_factors)]
    original = metadata.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return config | {
        "intermediate_size": metadata.same_integer("feed_forward_length"),
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
        "sliding_window": metadata.integer("attention.sliding_window", 0, least=0) or None,
    }


PHI3: Final = {"phi3": Architecture(_read, LAYER, ENDS)}
