"""GPT-2, whose matrices are [out, in] in files."""

from __future__ import annotations

from typing import Final

from quire.models.gguf.architectures.common import matrix_shape, refuse_changes
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, Config, Floats, Shapes

LAYER: Final = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GPT2_ENDS: Final = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}


def _read(metadata: Metadata, shapes: Shapes, _floats: Floats | None) -> Config:
    """Read the sizes of tensors; the converter states a width of MLPs that may be wrong."""
    refuse_changes(metadata)
    vocab_size, width = matrix_shape(shapes, "token_embd.weight")
    if metadata.integer("embedding_length") != width:
        raise metadata.wrong("embedding_length", metadata.integer("embedding_length"), f"the embedding's width {width}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab_size,
        "n_embd": width,
        "n_head": metadata.same_integer("attention.head_count"),
        "n_inner": matrix_shape(shapes, "blk.0.ffn_up.weight")[0],
        "n_layer": metadata.num_blocks,
        "n_positions": matrix_shape(shapes, "position_embd.weight")[0],
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _renamed(_config: Config, name: str) -> str:
    return name.replace("transformer.h.", "model.layers.")


GPT2: Final = {"gpt2": Architecture(_read, LAYER, GPT2_ENDS, renamed=_renamed)}
