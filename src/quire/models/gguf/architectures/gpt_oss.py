"""gpt-oss: attention sinks, windows in every second layer, and experts with biases."""

from __future__ import annotations

from typing import Final

from quire.models.families.hf_config import FULL, WINDOWED
from quire.models.gguf.architectures.common import ATTENTION, ENDS, expert_names, has_tensor, read_common, read_experts
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, Config, Floats, Shapes

LAYER: Final = {
    **ATTENTION,
    "self_attn.sinks": "attn_sinks.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    **expert_names("mlp.experts"),
    "mlp.experts.down_proj.bias": "ffn_down_exps.bias",
}
# Number of the scores of experts that files may name: the softmax over the chosen logits.
SOFTMAX_OF_CHOSEN: Final = 3


def _read(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    config = read_common(metadata, shapes, "GptOssForCausalLM", floats, reads=("expert_count", "expert_gating_func"))
    metadata.require("expert_gating_func", 0, SOFTMAX_OF_CHOSEN)
    metadata.require("rope.dimension_count", config["head_dim"])
    theta = config["rope_parameters"]["rope_theta"]
    if metadata.number("rope.freq_base_swa", theta) != theta:
        raise metadata.wrong(
            "rope.freq_base_swa", metadata.number("rope.freq_base_swa"), f"that of all layers, {theta}"
        )
    experts = read_experts(metadata, shapes)
    return (
        config
        | experts
        | {
            "num_local_experts": experts["num_experts"],
            "intermediate_size": experts["moe_intermediate_size"],
            "attention_bias": has_tensor(shapes, "attn_q.bias"),
            "layer_types": [WINDOWED if has_window else FULL for has_window in metadata.window_pattern(2)],
            "sliding_window": metadata.integer("attention.sliding_window"),
            # Files lack this: the ends of YaRN's ramp are not rounded.
            "rope_parameters": config["rope_parameters"] | {"truncate": False},
        }
    )


GPT_OSS: Final = {"gpt-oss": Architecture(_read, LAYER, ENDS)}
