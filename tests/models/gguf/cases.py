"""Tiny checkpoints that a GGUF file can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.models.stored_tensors import stored_buffers, stored_tensors
from tests.models.tiny import CASES, LLAMA3_ROPE, SHAPE

# Name of a case -> fields that the format can hold in place of those of the tiny model of the same name.
GGUF_CASES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "llama3-rope": {
        "rope_parameters": LLAMA3_ROPE
        | {"rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192}
    },
    "llama-linear-rope-biases": {},
    "mistral-head-dim": {},
    "mistral-window": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-yarn": {},
    "qwen3-moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "llama4": {
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "ministral3": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "smollm3": {"use_sliding_window": False, "num_hidden_layers": 4},
    "smollm3-options": {"no_rope_layers": None},
    "seed-oss": {},
    "seed-oss-options": {},
    "gemma": {},
    "gemma-options": {"tie_word_embeddings": True},
    "glm": {},
    "glm4": {},
    "glm4-moe": {},
    "glm4-moe-options": {"norm_topk_prob": True},
    "olmo2": {},
    "olmo3": {},
    "olmo3-options": {},
    "minimax-m2": {},
    "phi3": {},
    "phi3-longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "attention_factor": 1.25,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [1.0, 2.5, 4.0, 16.0],
        }
    },
    "gpt-oss": {},
    "qwen3-next": {},
    "qwen3.5": {},
    "qwen3.5-options": {},
    "qwen3.5-moe": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "gemma3-options": {"query_pre_attn_scalar": 32, "attention_bias": False},
    "gemma3n": {},
    "gemma3n-options": {"altup_correct_scale": True},
    "gemma4": {},
    "gemma4-moe": {},
    "gemma4-keys-as-values": {
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
    },
    "lfm2": {},
    "lfm2-options": {},
    "lfm2-moe": {},
    "granite4": {},
    "granite4-options": {},
    "granite4-moe": {},
    "granite4-attention": {},
    "nemotron-h": {},
    "nemotron-h-moe": {},
    "falcon-h1": {},
    "gpt2": {},
    "gpt2-options": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    "falcon-h1-options": {"tie_word_embeddings": False},
}


def save_checkpoint(name: str, folder: Path) -> PreTrainedModel:
    """Write the checkpoint of a case, and return its model."""
    config_class, model_class, options = CASES[name]
    torch.manual_seed(len(name))
    model: PreTrainedModel = model_class(config_class(**SHAPE | options | GGUF_CASES[name])).eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), *stored_buffers(model).values()]:
            # Of few bits, so that one more or less is exact.
            values = torch.randn_like(parameter) * (0.15 if parameter.dim() > 1 else 0.4)
            parameter.copy_((values * 4096).round() / 4096 + (parameter.dim() == 1))
    model.config.architectures = [model_class.__name__]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(model.config.to_json_string())
    tensors = {key: values.contiguous() for key, values in stored_tensors(model).items()}
    save_file(tensors, folder / "model.safetensors")
    return model


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
