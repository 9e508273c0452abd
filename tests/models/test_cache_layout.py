"""The cache groups of published models beside figures worked out by hand, and layer kinds beside transformers'."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    Gemma3TextConfig,
    Gemma4TextConfig,
    Lfm2Config,
    Llama4TextConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
)

from quire.config import CACHE_DTYPES
from quire.memory import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from quire.models.families import build
from quire.models.families.quantization_config import without_quantization
from quire.models.specs.cache_layout import cache_specs
from quire.models.specs.spec import Attention, LayerSpec
from tests.models.published import CONFIGS

KIB = 1 << 10
BF16 = CACHE_DTYPES["bfloat16"]
# Name -> each group's kind and bytes of a token; bytes of a sequence's state. Layers x what one keeps, in bfloat16.
EXPECTED: dict[str, tuple[list[tuple[str, int]], int]] = {
    "Llama 2 7B": ([("all", 32 * 16 * KIB)], 0),
    "Llama 3.1 8B": ([("all", 32 * 4 * KIB)], 0),
    "Llama 3.1 70B": ([("all", 80 * 4 * KIB)], 0),
    "Qwen2.5 7B": ([("all", 28 * 2 * KIB)], 0),
    "Qwen3 0.6B": ([("all", 28 * 4 * KIB)], 0),
    "Qwen3 8B": ([("all", 36 * 4 * KIB)], 0),
    "Qwen3 32B": ([("all", 64 * 4 * KIB)], 0),
    "Mistral 7B v0.1": ([("4096", 32 * 4 * KIB)], 0),
    "Gemma 3 4B": ([("1024", 29 * 4 * KIB), ("all", 5 * 4 * KIB)], 0),
    "Gemma 3 27B": ([("1024", 52 * 8 * KIB), ("all", 10 * 8 * KIB)], 0),
    # The last 20 and 18 layers keep nothing.
    "Gemma 4 E2B": ([("512", 12 * KIB), ("all", 3 * 2 * KIB)], 0),
    "Gemma 4 E4B": ([("512", 20 * 2 * KIB), ("all", 4 * 4 * KIB)], 0),
    "Gemma 4 26B A4B": ([("1024", 25 * 8 * KIB), ("all", 5 * 4 * KIB)], 0),
    "Gemma 4 31B": ([("1024", 50 * 16 * KIB), ("all", 10 * 8 * KIB)], 0),
    "Llama 4 Scout": ([("chunk 8192", 36 * 4 * KIB), ("all", 12 * 4 * KIB)], 0),
    "Mixtral 8x7B": ([("all", 32 * 4 * KIB)], 0),
    "Qwen3 30B A3B": ([("all", 48 * 2 * KIB)], 0),
    "Phi-3.5 mini": ([("all", 32 * 12 * KIB)], 0),
    "Phi-4 mini": ([("all", 32 * 4 * KIB)], 0),
    "gpt-oss 20B": ([("128", 12 * 2 * KIB), ("all", 12 * 2 * KIB)], 0),
    # Two inputs of 2,048 values.
    "LFM2 1.2B": ([("all", 6 * 2 * KIB)], 10 * 2 * 2048 * 2),
    "LFM2 8B A1B": ([("all", 6 * 2 * KIB)], 18 * 2 * 2048 * 2),
    # 48 heads of 32 x 128 in float32; three inputs of the heads and of two projections to 128.
    "Granite 4.0 H-350M": ([("all", 4 * KIB)], 28 * (48 * 32 * 128 * 4 + 3 * (1536 + 256) * 2)),
    "Granite 4.0 H-Tiny": ([("all", 4 * 2 * KIB)], 36 * (48 * 64 * 128 * 4 + 3 * (3072 + 256) * 2)),
    # Every layer keeps both: 24 heads of 64 x 128, three inputs.
    "Falcon-H1 0.5B": ([("all", 36 * 512)], 36 * (24 * 64 * 128 * 4 + 3 * (1536 + 256) * 2)),
    # 16 matrices of 128 x 128 in float32; three inputs of 16 queries, 16 keys and 16 values of 128.
    "Qwen3.5 of 24 layers": ([("all", 6 * 2 * KIB)], 18 * (16 * 128 * 128 * 4 + 3 * 48 * 128 * 2)),
    "Qwen3.5 35B A3B": ([("all", 10 * 2 * KIB)], 30 * (32 * 128 * 128 * 4 + 3 * 64 * 128 * 2)),
    "Granite 3.3 8B": ([("all", 40 * 4 * KIB)], 0),
    "SmolLM3 3B": ([("all", 36 * 2 * KIB)], 0),
    "Seed-OSS 36B": ([("all", 64 * 4 * KIB)], 0),
    "Ministral 3 8B": ([("all", 34 * 4 * KIB)], 0),
    "GLM-4.5 Air": ([("all", 46 * 4 * KIB)], 0),
    "OLMo 3 7B": ([("4096", 24 * 16 * KIB), ("all", 8 * 16 * KIB)], 0),
    "MiniMax M2": ([("all", 62 * 4 * KIB)], 0),
    # 32 matrices of 128 x 128; three inputs of 16 queries, 16 keys and 32 values of 128.
    "Qwen3-Next 80B A3B": ([("all", 12 * 2 * KIB)], 36 * (32 * 128 * 128 * 4 + 3 * 64 * 128 * 2)),
    # 128 heads of 80 x 128; three inputs of the heads and of two projections to 8 groups of 128.
    "Nemotron Nano 9B v2": ([("all", 4 * 4 * KIB)], 27 * (128 * 80 * 128 * 4 + 3 * (10240 + 2048) * 2)),
    "Nemotron 3 Nano 30B A3B": ([("all", 6 * KIB)], 23 * (64 * 64 * 128 * 4 + 3 * (4096 + 2048) * 2)),
    "Bamba 9B": ([("all", 3 * 4 * KIB)], 29 * (128 * 64 * 128 * 4 + 3 * (8192 + 256) * 2)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models(name: str) -> None:
    groups, state_bytes = EXPECTED[name]
    found = []
    found_bytes = 0
    for spec in cache_specs(build(without_quantization(CONFIGS[name]))[0], 16, BF16, 2):
        match spec:
            case RecurrentState():
                found_bytes += spec.bytes_per_block
                continue
            case SlidingWindow(window=window):
                kind = str(window)
            case ChunkedLocal(chunk=chunk):
                kind = f"chunk {chunk}"
            case FullAttention():
                kind = "all"
        assert spec.bytes_per_block % 16 == 0
        found.append((kind, spec.bytes_per_block // 16))
    assert found == groups
    assert found_bytes == state_bytes


def test_the_cache_has_another_dtype_than_states_and_their_inputs() -> None:
    model = build(CONFIGS["Qwen3.5 of 24 layers"])[0]
    (fp8, state), (int8, same) = (cache_specs(model, 16, CACHE_DTYPES[name], 2) for name in ("fp8", "int8"))
    assert state == same
    assert fp8.bytes_per_block == 16 * 6 * KIB
    assert int8.bytes_per_block == 16 * (6 * KIB + 6 * 2 * 2 * 4)
    _, wider = cache_specs(model, 16, BF16, 4)
    assert isinstance(wider, RecurrentState)
    assert wider.layer_bytes == 16 * 128 * 128 * 4 + 3 * 48 * 128 * 4


def kind_of(layer: LayerSpec) -> str:
    """Return the name that `layer_types` has for a layer, without the kind of its recurrence."""
    if not isinstance(layer.mixer, Attention):
        return "recurrent"
    if layer.mixer.window is not None:
        return "sliding_attention"
    return "full_attention" if layer.mixer.chunk is None else "chunked_attention"


@pytest.mark.parametrize(
    ("architecture", "reference", "stated"),
    [
        ("Gemma3ForCausalLM", Gemma3TextConfig(num_hidden_layers=34), {}),
        ("Gemma4ForCausalLM", Gemma4TextConfig(num_hidden_layers=13), {}),
        ("Llama4ForCausalLM", Llama4TextConfig(num_hidden_layers=12, moe_layers=[]), {}),
        ("Llama4ForCausalLM", Llama4TextConfig(num_hidden_layers=5, no_rope_layers=[0, 1, 1, 0, 1]), {}),
        ("Qwen3_5ForCausalLM", Qwen3_5TextConfig(num_hidden_layers=10), {}),
        ("Qwen2ForCausalLM", Qwen2Config(num_hidden_layers=8, use_sliding_window=True, max_window_layers=5), {}),
        ("Lfm2ForCausalLM", Lfm2Config(num_hidden_layers=7, full_attn_idxs=[2, 5]), {"full_attn_idxs": [2, 5]}),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_layers_that_are_not_listed_are_those_of_transformers(
    architecture: str, reference: PreTrainedConfig, stated: dict[str, Any]
) -> None:
    recurrent = {"linear_attention": "recurrent", "conv": "recurrent"}
    listed = [recurrent.get(kind, kind) for kind in reference.layer_types]
    assert len({*listed}) == 2
    fields = reference.to_dict() | stated | {"layer_types": None, "architectures": [architecture]}
    assert [kind_of(layer) for layer in build(fields)[0].layers] == listed
