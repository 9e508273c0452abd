"""Attention modules whose heads a backend norms and rotates are those that compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from quire import LLM, SamplingParams
from quire.models.hosted import decoder
from quire.models.hosted.heads import recognise_heads, rotation_of
from quire.models.hosted.interface import NAME, register
from quire.models.hosted.trial import examine
from quire.models.specs.hosted_spec import HostedAttention, HostedHeads
from quire.ops.reference.reference_ops import rotary
from tests.hosted.small_configs import MODEL_TYPES, small_config

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
PLAIN = HostedHeads(PROJECTIONS, "o_proj", (), True, 2)
NORMED = HostedHeads(PROJECTIONS, "o_proj", ("q_norm", "k_norm"), True, 2)
UNTURNED = HostedHeads(PROJECTIONS, "o_proj", (), False, 2)
# What is computed of each layer's heads in small models: None for a layer with something that no backend computes.
CASES: dict[str, Sequence[HostedHeads | None]] = {
    "llama": [PLAIN] * 4,
    "qwen3": [NORMED] * 4,
    "gemma2": [PLAIN] * 4,
    "smollm3": [PLAIN, PLAIN, PLAIN, UNTURNED],
    "cohere": [None] * 4,  # neighbours are rotated
    "dbrx": [None] * 4,  # limits of heads
    "gpt_oss": [None] * 4,  # sinks
    "ministral3": [None] * 4,  # queries are scaled by their positions
    "olmo2": [None] * 4,  # one norm for all heads
    "stablelm": [None] * 4,  # a part of a head is rotated
}
NUM_ROWS = 5
HEADS: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def attention_of(config: dict[str, Any]) -> HostedAttention:
    return HostedAttention(
        module="",
        layer_idx=0,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        key_width=config["head_dim"],
        value_width=config["head_dim"],
        window=None,
        chunk=None,
        scale=0.25,
        soft_cap=None,
        sinks=False,
    )


@pytest.mark.parametrize("model_type", CASES)
def test_heads_of_small_models(model_type: str) -> None:
    config = json.loads(small_config(model_type).to_json_string(use_diff=False))
    spec = examine({**config, "architectures": [MODEL_TYPES[model_type]]})
    assert [call.heads for call in spec.attention] == CASES[model_type]


def limit_queries(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    module.q_norm.register_forward_hook(lambda _, __, heads: heads.clamp(-1000, 1000))
    return given


def swap_parts(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    module.k_proj, module.v_proj = module.v_proj, module.k_proj
    return given


def scale_rows(_: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "hidden_states": given["hidden_states"] * 1.5}


def scale_by_position(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    factors = 1.0 + (given["position_ids"] // 8192)[..., None]
    module.o_proj.register_forward_hook(lambda _, __, output: output * factors)
    return given


def gate_output(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    module.o_proj.register_forward_pre_hook(lambda _, heads: (heads[0].sigmoid() * heads[0],))
    return given


SWAPPED = HostedHeads(("q_proj", "v_proj", "k_proj"), "o_proj", ("q_norm", "k_norm"), True, 2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _, given: given, NORMED),
        (swap_parts, SWAPPED),
        (limit_queries, None),
        (scale_rows, None),
        (scale_by_position, None),
        (gate_output, None),
    ],
)
def test_what_else_a_module_does_is_seen(
    change: Callable[[Any, dict[str, Any]], dict[str, Any]], expected: HostedHeads | None
) -> None:
    """Changes are made in each forward pass, also in that of a copy."""
    register()
    modeling = import_module("transformers.models.qwen3.modeling_qwen3")
    config: Any = CONFIG_MAPPING["qwen3"](**HEADS)
    config._attn_implementation = NAME
    module: nn.Module = modeling.Qwen3Attention(config, 0).eval()
    module.register_forward_pre_hook(lambda part, _, given: ((), change(part, given)), with_kwargs=True)
    angles = torch.rand(2, 1, NUM_ROWS, 8)
    given = {
        "hidden_states": torch.randn(1, NUM_ROWS, 48),
        "position_embeddings": torch.cat((angles, angles), -1).unbind(),
        "position_ids": torch.arange(NUM_ROWS)[None],
        "attention_mask": None,
    }
    assert recognise_heads(module, attention_of(HEADS), given) == expected


def test_rotations_are_those_of_the_backends() -> None:
    angles = torch.rand(1, NUM_ROWS, 8)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    heads = torch.randn(NUM_ROWS, 3, 16)
    first, second = heads.chunk(2, -1)
    wanted = heads * cos[0, :, None] + torch.cat((-second, first), -1) * sin[0, :, None]
    torch.testing.assert_close(rotary(heads, rotation_of(cos, sin)), wanted)


def log_probabilities(dtype: str) -> Tensor:
    """Return the log probabilities of a prompt's tokens over transformers' modules."""
    llm = LLM("bundled", model_impl="transformers", dtype=dtype, num_threads=1, max_model_len=96, num_kv_blocks=20)
    prompt = {"prompt_token_ids": [5 + 7 * idx % 900 for idx in range(60)]}
    output = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    steps = [step for step in output.prompt_logprobs or () if step]
    return torch.tensor([next(iter(step.values())).logprob for step in steps])


def test_log_probabilities_are_those_of_the_modules_own_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; in bfloat16, they are as close to these."""
    exact, rounded = log_probabilities("float32"), log_probabilities("bfloat16")
    monkeypatch.setattr(decoder, "use_backend_heads", lambda *_: None)
    own_exact, own_rounded = log_probabilities("float32"), log_probabilities("bfloat16")
    torch.testing.assert_close(exact, own_exact, rtol=0.0, atol=1e-4)
    assert (rounded - own_exact).abs().mean() < 1.3 * (own_rounded - own_exact).abs().mean()
    assert not torch.equal(rounded, own_rounded), "both were computed in the same way"
