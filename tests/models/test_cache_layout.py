"""What models keep, from their configurations alone, beside figures worked out by hand and transformers' reading."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    BambaConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from quire.config import CACHE_DTYPES
from quire.errors import CheckpointError, UnsupportedModel
from quire.memory import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from quire.memory.sizing import tokens_bytes
from quire.models.cache_layout import KINDS, READ, layout_of, read_kinds, read_layout
from quire.models.families import FAMILIES, build
from tests.models.published import CONFIGS, llama

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
    "Gemma 2 9B": ([("4096", 21 * 8 * KIB), ("all", 21 * 8 * KIB)], 0),
    "Gemma 3 4B": ([("1024", 29 * 4 * KIB), ("all", 5 * 4 * KIB)], 0),
    "Gemma 3 27B": ([("1024", 52 * 8 * KIB), ("all", 10 * 8 * KIB)], 0),
    # The last 10, 15, 20 and 18 layers keep nothing.
    "Gemma 3n E2B": ([("512", 16 * 2 * KIB), ("all", 4 * 2 * KIB)], 0),
    "Gemma 3n E4B": ([("512", 16 * 2 * KIB), ("all", 4 * 2 * KIB)], 0),
    "Gemma 4 E2B": ([("512", 12 * KIB), ("all", 3 * 2 * KIB)], 0),
    "Gemma 4 E4B": ([("512", 20 * 2 * KIB), ("all", 4 * 4 * KIB)], 0),
    "Gemma 4 31B": ([("1024", 50 * 16 * KIB), ("all", 10 * 8 * KIB)], 0),
    "gpt-oss 20B": ([("128", 12 * 2 * KIB), ("all", 12 * 2 * KIB)], 0),
    "Llama 4 Scout": ([("chunk 8192", 36 * 4 * KIB), ("all", 12 * 4 * KIB)], 0),
    "Mixtral 8x7B": ([("all", 32 * 4 * KIB)], 0),
    "Qwen3 30B A3B": ([("all", 48 * 2 * KIB)], 0),
    # Two inputs of 2,048 values.
    "LFM2 1.2B": ([("all", 6 * 2 * KIB)], 10 * 2 * 2048 * 2),
    # 48 heads of 64 x 128 in float32; three inputs of the heads and of two projections to 128.
    "Granite 4.0 H-Tiny": ([("all", 4 * 2 * KIB)], 36 * (48 * 64 * 128 * 4 + 3 * (3072 + 256) * 2)),
    # 48 heads of 32 x 128.
    "Granite 4.0 H-350M": ([("all", 4 * KIB)], 28 * (48 * 32 * 128 * 4 + 3 * (1536 + 256) * 2)),
    "Bamba 9B": ([("all", 3 * 4 * KIB)], 29 * (128 * 64 * 128 * 4 + 3 * (8192 + 256) * 2)),
    # 8,192 rows of 16 in float32; three inputs.
    "Jamba 52B": ([("all", 4 * 4 * KIB)], 28 * (8192 * 16 * 4 + 3 * 8192 * 2)),
    # Every layer keeps both: 24 heads of 64 x 128, three inputs.
    "Falcon-H1 0.5B": ([("all", 36 * 512)], 36 * (24 * 64 * 128 * 4 + 3 * (1536 + 256) * 2)),
    # 32 matrices of 128 x 128 in float32; three inputs of 16 queries, 16 keys and 32 values of 128.
    "Qwen3-Next 80B": ([("all", 12 * 2 * KIB)], 36 * (32 * 128 * 128 * 4 + 3 * 64 * 128 * 2)),
    "Qwen3.5 of 24 layers": ([("all", 6 * 2 * KIB)], 18 * (16 * 128 * 128 * 4 + 3 * 48 * 128 * 2)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models(name: str) -> None:
    layout = read_layout(CONFIGS[name])
    groups, state_bytes = EXPECTED[name]
    found = []
    found_bytes = 0
    for spec in layout.specs(16, BF16, 2):
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
    layout = read_layout(CONFIGS["Qwen3-Next 80B"])
    (fp8, state), (int8, same) = (layout.specs(16, CACHE_DTYPES[name], 2) for name in ("fp8", "int8"))
    assert state == same
    assert fp8.bytes_per_block == 16 * 12 * KIB
    assert int8.bytes_per_block == 16 * (12 * KIB + 12 * 2 * 2 * 4)
    _, wider = layout.specs(16, BF16, 4)
    assert wider.layer_bytes == 32 * 128 * 128 * 4 + 3 * 64 * 128 * 4
    _, narrow = read_layout(CONFIGS["Qwen3-Next 80B"] | {"mamba_ssm_dtype": "bfloat16"}).specs(16, BF16, 2)
    assert narrow.layer_bytes == (32 * 128 * 128 + 3 * 64 * 128) * 2


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CONFIGS
        # A family may refuse what the generic fields can size: experts beside Mamba, here.
        if CONFIGS[name]["architectures"][0] in FAMILIES and name != "Granite 4.0 H-Tiny"
    ],
)
def test_a_family_and_the_generic_fields_agree(name: str) -> None:
    family = layout_of(build(CONFIGS[name])[0])
    generic = read_layout(CONFIGS[name])
    assert sum(count for _, count in family.attention) == sum(count for _, count in generic.attention)
    assert tokens_bytes(family.specs(1, BF16, 2)) == tokens_bytes(generic.specs(1, BF16, 2))
    assert family.states == generic.states


@pytest.mark.parametrize(
    ("reference", "stated"),
    [
        (Gemma3TextConfig(num_hidden_layers=34), {}),
        (Gemma2Config(num_hidden_layers=9), {}),
        (Gemma3nTextConfig(num_hidden_layers=12, num_kv_shared_layers=3), {}),
        (Gemma4TextConfig(num_hidden_layers=13), {}),
        (Llama4TextConfig(num_hidden_layers=12, moe_layers=[]), {}),
        (Llama4TextConfig(num_hidden_layers=5, no_rope_layers=[0, 1, 1, 0, 1]), {}),
        (Qwen3NextConfig(num_hidden_layers=10), {"full_attention_interval": 4}),
        (Qwen3_5TextConfig(num_hidden_layers=10), {}),
        (Qwen2Config(num_hidden_layers=8, use_sliding_window=True, max_window_layers=5), {}),
        (Lfm2Config(num_hidden_layers=7, full_attn_idxs=[2, 5]), {"full_attn_idxs": [2, 5]}),
        (JambaConfig(num_hidden_layers=20, attn_layer_period=4, attn_layer_offset=0), {}),
        (BambaConfig(num_hidden_layers=9, attn_layer_indices=[0, 7]), {}),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_layers_that_are_not_listed_are_those_of_transformers(
    reference: PreTrainedConfig, stated: dict[str, Any]
) -> None:
    listed = getattr(reference, "layer_types", None) or reference.layers_block_type
    fields = reference.to_dict() | stated | {"layer_types": None, "layers_block_type": None}
    assert read_kinds(fields) == tuple(KINDS[kind] for kind in listed)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("kv_lora_rank", {"kv_lora_rank": 512}),
        ("num_kv_shared_layers", {"text_config": {"num_hidden_layers": 2, "num_kv_shared_layers": 1}}),
        ("is_encoder_decoder", {"is_encoder_decoder": True}),
        ("hybrid_override_pattern", {"hybrid_override_pattern": "M*M-"}),
        ("layer_types", {"mamba_d_state": 16}),
        ("layer_types", {"sliding_window": 512}),
        ("layer_types", {"layer_types": ["full_attention", "lightning"]}),
        ("layer_types", {"layer_types": ["full_attention"]}),
        ("layers_block_type", {"layers_block_type": ["attention", "retention"]}),
        ("layer_types", {"layer_types": ["conv", "conv"], "conv_L_cache": 3}),
    ],
)
def test_what_changes_the_cache_and_is_not_understood_is_refused(field: str, changes: dict[str, Any]) -> None:
    config = llama(64, 2, 4, 2, 96, 100, architectures=["SomeForCausalLM"])
    read_layout(config)
    if "text_config" in changes:
        changes = {"text_config": config | changes["text_config"]}
    with pytest.raises(UnsupportedModel, match=field) as caught:
        read_layout(config | changes)
    assert caught.value.field == field


@pytest.mark.parametrize("fields", [("num_kv_shared_layers",), ("global_head_dim",), ("num_global_key_value_heads",)])
def test_what_is_read_of_gemma4_is_refused_of_others(fields: tuple[str, ...]) -> None:
    text = CONFIGS["Gemma 4 31B"]["text_config"] | {"num_kv_shared_layers": 6}
    read_layout({"text_config": text})
    unknown = {name: value for name, value in text.items() if name in fields or name not in READ["gemma4_text"]}
    with pytest.raises(UnsupportedModel, match=fields[0]):
        read_layout({"text_config": unknown | {"model_type": "gemma9_text", "max_position_embeddings": 100}})


def test_missing_fields_are_all_named() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_layout({"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "num_attention_heads": 12})
    for name in ("GPT2LMHeadModel", "num_hidden_layers", "num_key_value_heads", "hidden_size"):
        assert name in str(caught.value)
    assert "num_attention_heads" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("num_key_value_heads", {"num_key_value_heads": "8"}),
        ("full_attn_idxs", {"full_attn_idxs": [2, -1], "conv_L_cache": 3}),
        ("attn_layer_offset", {"attn_layer_period": 2, "attn_layer_offset": -1}),
        ("conv_L_cache", {"layer_types": ["conv", "full_attention"]}),
        ("linear_key_head_dim", {"layer_types": ["linear_attention", "full_attention"]}),
        ("mamba_expand", {"layer_types": ["mamba", "attention"], "mamba_d_state": 16}),
    ],
)
def test_a_wrong_field_is_named(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=name):
        read_layout(llama(64, 2, 4, 2, 96, 100) | changes)
