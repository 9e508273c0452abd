"""Write a GGUF file with the exact shape of a known model and random blocks: `python -m benchmarks.make_gguf`.

Speed does not depend on what the weights say, so nothing needs to be downloaded or quantised: random bytes are valid
blocks, and scales are such that weights have about the spread of a trained model's. The types of a mix are laid out as
`llama-quantize` lays them out: in Q4_K_M, half of the values' and downs' matrices and the embedding are Q6_K.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from benchmarks.contenders import MIXES
from benchmarks.make_model import FOLDER, QWEN3

# Where a block has float16 scales, and scales for which a weight is about 0.02.
SCALES: dict[Type, tuple[tuple[int, float], ...]] = {
    Type.Q4_0: ((0, 4e-3),),
    Type.Q8_0: ((0, 3e-4),),
    Type.Q4_K: ((0, 1e-4), (2, 7.5e-4)),
    Type.Q5_K: ((0, 5e-5), (2, 7.5e-4)),
    Type.Q6_K: ((208, 1.5e-5),),
    Type.IQ4_XS: ((0, 1.5e-5),),
}


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a Qwen3 model's tensors, norms first in each layer."""
    width, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield "token_embd.weight", (config["vocab_size"], width)
    yield "output_norm.weight", (width,)
    for idx in range(config["num_hidden_layers"]):
        for name, shape in (
            ("attn_norm", (width,)),
            ("attn_q", (heads * dim, width)),
            ("attn_k", (kv_heads * dim, width)),
            ("attn_v", (kv_heads * dim, width)),
            ("attn_q_norm", (dim,)),
            ("attn_k_norm", (dim,)),
            ("attn_output", (width, heads * dim)),
            ("ffn_norm", (width,)),
            ("ffn_gate", (mlp, width)),
            ("ffn_up", (mlp, width)),
            ("ffn_down", (width, mlp)),
        ):
            yield f"blk.{idx}.{name}.weight", shape


def type_of(name: str, mix: str, num_layers: int) -> Type:
    """Return the type of a matrix in a mix."""
    if mix != "q4_k_m":
        if name == "token_embd.weight" and mix in ("q4_0", "iq4_xs", "q5_k"):
            return Type.Q6_K
        return Type[mix.upper()]
    if name == "token_embd.weight":
        return Type.Q6_K
    layer = int(name.split(".")[1])
    has_more_bits = layer < num_layers // 8 or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2
    return Type.Q6_K if has_more_bits and ("attn_v" in name or "ffn_down" in name) else Type.Q4_K


def random_blocks(kind: Type, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Return random blocks, uint8 [rows, bytes of a row]."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.frombuffer(rng.bytes(shape[0] * (shape[1] // size) * num_bytes), np.uint8).copy()
    blocks = raw.reshape(-1, num_bytes)
    for at, scale in SCALES[kind]:
        scales = rng.uniform(0.8, 1.2, (len(blocks), 1)) * scale
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1)


def write(path: Path, mix: str, config: dict[str, Any] = QWEN3) -> Path:
    """Write a file; it has no tokenizer."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, shape in tensors(config):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            kind = type_of(name, mix, config["num_hidden_layers"])
            writer.add_tensor(name, random_blocks(kind, shape, rng), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mix", choices=MIXES)
    parser.add_argument("path", nargs="?", type=Path, help="file to write")
    arguments = parser.parse_args()
    path = arguments.path or FOLDER / f"qwen3-0.6b-{arguments.mix}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    print(write(path, arguments.mix))


if __name__ == "__main__":
    main()
