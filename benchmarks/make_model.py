"""Write a checkpoint with the exact shape of a known model and random weights: `python -m benchmarks.make_model`.

Speed does not depend on what the weights say, so nothing needs to be downloaded. In bfloat16, Qwen3-0.6B's shape takes
1.2 GB and Llama-3.2-1B's 2.5 GB. The second has other heads, so that nothing is tuned to the first alone; it leaves out
the scaling of rotations for long contexts, which is no work for an engine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG_FILE = "config.json"
FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "bench"
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
SHAPES = {"qwen3-0.6b": QWEN3, "llama-3.2-1b": LLAMA}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its name in Hugging Face checkpoints."""
    width, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query_width, kv_width = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (query_width, width),
        "self_attn.k_proj.weight": (kv_width, width),
        "self_attn.v_proj.weight": (kv_width, width),
        "self_attn.o_proj.weight": (width, query_width),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (ffn, width),
        "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
    }
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    every = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        every["lm_head.weight"] = (config["vocab_size"], width)
    layers = range(config["num_hidden_layers"])
    return every | {f"model.layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}


def random_weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a weight of float32: random if it is a matrix, ones if it is a scale."""
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02


def write(config: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint with random weights; the same bytes every time."""
    generator = torch.Generator().manual_seed(1234)
    every = sorted(shapes(config).items())
    save(config, {name: random_weight(shape, generator).to(torch.bfloat16) for name, shape in every}, folder)


def save(config: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write model.safetensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Last, so that an interrupted write is not taken for a checkpoint.
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def is_written(folder: Path) -> bool:
    """Say whether a folder has a whole checkpoint."""
    return (folder / CONFIG_FILE).exists()


def ensure(shape: str = "qwen3-0.6b", folder: Path | None = None) -> Path:
    """Return the folder of a shape's checkpoint, written first where it is missing."""
    folder = FOLDER / f"{shape}-random" if folder is None else folder
    if not is_written(folder):
        print(f"writing the random checkpoint to {folder}", flush=True)
        write(SHAPES[shape], folder)
    return folder


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    options = parser.parse_args()
    print(ensure(options.shape, options.folder))


if __name__ == "__main__":
    main()
