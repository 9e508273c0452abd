"""Write a checkpoint with the exact shape of Qwen3-0.6B and random weights: `python -m benchmarks.make_model`.

Speed does not depend on what the weights say, so nothing needs to be downloaded. 1.2 GB in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "bench" / "qwen3-0.6b-random"
CONFIG = {
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
NUM_LAYERS, VOCAB, WIDTH, FFN, HEAD_DIM = 28, 151936, 1024, 3072, 128
QUERY_WIDTH, KV_WIDTH = 16 * HEAD_DIM, 8 * HEAD_DIM


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its name in Hugging Face checkpoints; the output head is the embedding."""
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (WIDTH,),
        "self_attn.q_proj.weight": (QUERY_WIDTH, WIDTH),
        "self_attn.k_proj.weight": (KV_WIDTH, WIDTH),
        "self_attn.v_proj.weight": (KV_WIDTH, WIDTH),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "self_attn.o_proj.weight": (WIDTH, QUERY_WIDTH),
        "post_attention_layernorm.weight": (WIDTH,),
        "mlp.gate_proj.weight": (FFN, WIDTH),
        "mlp.up_proj.weight": (FFN, WIDTH),
        "mlp.down_proj.weight": (WIDTH, FFN),
    }
    every = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    return every | {f"model.layers.{i}.{name}": shape for i in range(NUM_LAYERS) for name, shape in layer.items()}


def write(folder: Path) -> None:
    """Write config.json and model.safetensors; the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1234)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in sorted(shapes().items())
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n", encoding="utf-8")


def ensure(folder: Path = DEFAULT_FOLDER) -> Path:
    """Return the folder of the checkpoint, written first where it is missing."""
    # config.json is written last, so that an interrupted write is not taken for a checkpoint.
    if not (folder / "config.json").exists():
        print(f"writing the random checkpoint to {folder}", flush=True)
        write(folder)
    return folder


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER)
    print(ensure(parser.parse_args().folder))


if __name__ == "__main__":
    main()
