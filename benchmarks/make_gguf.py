"""Write a GGUF file with the exact shape of a known model and random blocks: `python -m benchmarks.make_gguf`.

Speed does not depend on what the weights say, so nothing needs to be downloaded or quantised: random bytes are valid
blocks, and scales are such that weights have about the spread of a trained model's. The types of a mix are laid out as
`llama-quantize` lays them out: in Q4_K_M, half of the values' and downs' matrices and the embedding are Q6_K.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from benchmarks.contenders import MIXES
from benchmarks.gguf_shapes import FLOATS, SHAPES, add_metadata, tensors
from benchmarks.make_model import CONFIG_FILE, FOLDER, QWEN3

# Where a block has float16 scales, and scales for which a weight is about 0.02.
SCALES: dict[Type, tuple[tuple[int, float], ...]] = {
    Type.Q4_0: ((0, 4e-3),),
    Type.Q8_0: ((0, 3e-4),),
    Type.Q4_K: ((0, 1e-4), (2, 7.5e-4)),
    Type.Q5_K: ((0, 5e-5), (2, 7.5e-4)),
    Type.Q6_K: ((208, 1.5e-5),),
    Type.IQ4_XS: ((0, 1.5e-5),),
}


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
    """Write a file of one of the architectures qwen3, qwen3moe and qwen35; it has no tokenizer."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, config["model_type"])
    add_metadata(writer, config)
    writer.add_tokenizer_model("none")
    for name, shape in tensors(config):
        if len(shape) == 1 or name.endswith(FLOATS):
            scale = -1.0 if name.endswith("ssm_a") else 1.0 if len(shape) == 1 else 0.02
            writer.add_tensor(name, np.full(shape, scale, np.float32) * rng.uniform(0.8, 1.2, shape).astype(np.float32))
        else:
            kind = type_of(name, mix, config["num_hidden_layers"])
            rows = random_blocks(kind, (math.prod(shape[:-1]), shape[-1]), rng)
            writer.add_tensor(name, rows.reshape(*shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ensure_folder(shape: str) -> Path:
    """Return a folder with the configuration of a shape that has GGUF files only."""
    folder = FOLDER / f"{shape}-random"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    return folder


def main() -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mix", choices=MIXES)
    parser.add_argument("path", nargs="?", type=Path, help="file to write")
    parser.add_argument("--shape", choices=("qwen3-0.6b", *SHAPES), default="qwen3-0.6b")
    arguments = parser.parse_args()
    path = arguments.path or FOLDER / f"{arguments.shape}-{arguments.mix}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    print(write(path, arguments.mix, SHAPES.get(arguments.shape, QWEN3)))


if __name__ == "__main__":
    main()
