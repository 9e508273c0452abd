"""LFM2 (dense): the layers without KV heads are short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.models.families.hf_config import FULL
from quire.models.families.lfm2 import CONV
from quire.models.gguf.architectures.common import ATTENTION, ENDS, has_tensor, read_common
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


def _read(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    config = read_common(metadata, shapes, "Lfm2ForCausalLM", floats)
    metadata.require("rope.dimension_count", config["head_dim"])
    kv_heads = metadata.integers("attention.head_count_kv")
    if len({*kv_heads} - {0}) != 1:
        raise metadata.wrong("attention.head_count_kv", [*kv_heads], "0 or one other number in each layer")
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "intermediate_size": metadata.same_integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if each else CONV for each in kv_heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": has_tensor(shapes, "shortconv.conv.bias"),
    }


def _changes(_config: Config) -> Mapping[str, Change]:
    return {"conv.conv.weight": Change(layout="unsqueeze_1")}


LFM2: Final = {
    # The final norm has the name of a norm of embeddings.
    "lfm2": Architecture(_read, LAYER, ENDS | {"model.embedding_norm.weight": "token_embd_norm.weight"}, _changes)
}
