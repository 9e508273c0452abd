"""Modules of transformers that are filled from small checkpoints, and the tensors that they hold then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.hosted.build import build_module
from quire.models.hosted.experts import HostedExperts, use_packed_experts
from quire.models.hosted.linear import UNWATCHED, HostedEmbedding, HostedLinear, LayerUse, is_transposed
from quire.models.hosted.weights import fill
from quire.ops.interface.quantized_weight import StoredWeight

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT_SIZES: dict[str, Any] = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
# Model type -> fields. Merged experts, experts with biases, [in, out] weights, a split and a chunked QKV, tied heads
# with and without a bias, weights that stay in float32.
CASES: dict[str, dict[str, Any]] = {
    "olmo2": SIZES,
    "gpt2": GPT_SIZES,
    "ctrl": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "dff": 48},
    "cohere": SIZES,
    "minimax_m2": SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": SIZES
    | EXPERTS
    | LATENT
    | {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "v_head_dim": 8, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4},
    "gpt_oss": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gptj": GPT_SIZES | {"rotary_dim": 4},
    "sarvam_moe": SIZES | EXPERTS | {"num_experts": 4, "n_group": 2, "topk_group": 1, "head_dim": 8},
}


class KeptLinear:
    """A linear layer that keeps what it was made of."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        product = nn.functional.linear(x, self.weight, self.bias)
        return product if residual is None else product + residual

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class KeepingOps:
    """Kernels whose linear layers keep their weights."""

    name = "keeping"

    def pack_linear(self, weight: Tensor | StoredWeight, bias: Tensor | None = None, **_: Any) -> KeptLinear:
        values = weight.dequantize() if isinstance(weight, StoredWeight) else weight.clone()
        return KeptLinear(values, None if bias is None else bias.clone())


def save(model_type: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Write a random checkpoint, and return the module whose weights it has."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(new_config(model_type), dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
    model.save_pretrained(folder)
    return model.eval()


def new_config(model_type: str) -> Any:
    """Return the configuration of a case."""
    return CONFIG_MAPPING[model_type](**CASES[model_type])


def load(kind: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the module that transformers loads."""
    return type(kind).from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")


def filled(folder: Path, ops: Any = None, dtype: torch.dtype = torch.float32, use: LayerUse = UNWATCHED) -> Any:
    """Return a module that Quire fills; by default, its linear layers keep their weights."""
    checkpoint = Checkpoint.open(str(folder))
    module: Any = build_module(checkpoint.config, dtype=dtype)
    use_packed_experts(module)
    module.config._attn_implementation = "eager"
    kernels: Any = ops or KeepingOps()
    table = fill(module, checkpoint, ops=kernels, dtype=dtype, device=CPU, use=use)
    assert not table.missing
    return module


def state_of(module: Any) -> dict[str, Tensor]:
    """Return the tensors of a filled module by their names in transformers' module, out of layers that keep them."""
    return {**module.state_dict(), **dict(_packed(module))}


def _packed(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, layer in module.named_modules():
        if isinstance(layer, HostedLinear):
            run: Any = layer._projection.run
            yield f"{name}.weight", run.weight
            if run.bias is not None:
                yield f"{name}.bias", run.bias
        elif isinstance(layer, HostedEmbedding):
            look_up: Any = layer._look_up
            yield f"{name}.weight", look_up.__self__.weight
        packed = getattr(layer, "_hosted_experts", None)
        if isinstance(packed, HostedExperts):
            made: Any = layer
            for own, projections in packed.projections.items():
                runs: list[Any] = list(projections.runs)
                weights = torch.stack([run.weight for run in runs])
                yield f"{name}.{own}", weights.mT if made.is_transposed else weights
                if made.has_bias:
                    yield f"{name}.{own}_bias", torch.stack([run.bias for run in runs])


def transposed_names(module: nn.Module) -> set[str]:
    """Return the weights that a module holds as [in, out]."""
    return {f"{name}.weight" for name, layer in module.named_modules() if is_transposed(layer)}
