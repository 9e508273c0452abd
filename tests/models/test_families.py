"""Reading config.json: both dialects of rotation, and refusals that name the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.families import FAMILIES, build
from quire.models.families.encoders import ENCODERS
from quire.models.specs.frequencies import inverse_frequencies
from quire.models.specs.rotations import LinearScaling, Llama3Scaling, Rope
from quire.models.specs.spec import ModelSpec
from tests.models.tiny import LLAMA3_ROPE, YARN_ROPE

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
# Changes that make it another family's.
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
QWEN: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"]}
GEMMA: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "hidden_act": ...}
GEMMA_PARTS: dict[str, Any] = {"architectures": ["Gemma3ForConditionalGeneration"]}


def read(**changes: Any) -> ModelSpec:
    """Read LLAMA with changes; a change to `...` removes the field."""
    return build({name: value for name, value in (LLAMA | changes).items() if value is not ...})[0]


def test_older_dialect_of_rotation() -> None:
    """Before transformers 5, theta and scaling were two fields, and the type had another name."""
    scaling = {name: value for name, value in LLAMA3_ROPE.items() if name not in ("rope_type", "rope_theta")}
    older = read(rope_theta=10000.0, rope_scaling=scaling | {"type": "llama3"})
    newer = read(rope_parameters=LLAMA3_ROPE)
    assert older == newer
    assert newer.layers[0].mixer.rope == Rope(10000.0, Llama3Scaling(4.0, 1.0, 4.0, 64))


def test_theta_is_found_in_all_places() -> None:
    assert read().layers[0].mixer.rope == Rope(10000.0)
    assert read(rope_theta=7.0).layers[0].mixer.rope == Rope(7.0)
    assert read(rope_theta=7.0, rope_scaling=None).layers[0].mixer.rope == Rope(7.0)
    assert read(rope_theta=7, rope_parameters={"rope_type": "default"}).layers[0].mixer.rope == Rope(7.0)
    assert read(rope_theta=7.0, rope_parameters={"rope_theta": 9.0}).layers[0].mixer.rope == Rope(9.0)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 3.0},
        LLAMA3_ROPE,
        LLAMA3_ROPE | {"factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
        YARN_ROPE,
        YARN_ROPE | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
        YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3},
        YARN_ROPE | {"attention_factor": 1.25},
        {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
        {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.3, "factor": 4.0},
    ],
    ids=lambda parameters: str(parameters["rope_type"]),
)
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(parameters)
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rope = read(rope_parameters=parameters, max_position_embeddings=256).layers[0].mixer.rope
    assert isinstance(rope, Rope)
    found, scale = inverse_frequencies(rope, 128)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert scale == pytest.approx(factor, rel=1e-12)


def test_longest_context() -> None:
    assert read().max_position == 512
    # A YaRN checkpoint may state the length of the original model only.
    assert read(rope_parameters=YARN_ROPE, max_position_embeddings=64).max_position == 256


def test_head_dim_is_divided_out_or_given() -> None:
    assert read().layers[0].mixer.head_dim == 16
    assert read(head_dim=40).layers[0].mixer.head_dim == 40
    assert read(head_dim=None).layers[0].mixer.head_dim == 16
    assert read(num_key_value_heads=...).layers[0].mixer.num_kv_heads == 4


def test_unknown_architecture_names_the_page_that_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'MambaForCausalLM' is not implemented; docs/checkpoints\.md lists"):
        read(architectures=["MambaForCausalLM"])
    page = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Architectures")
    assert re.findall(r"`(\w+)`", section.partition("\n## ")[0].partition("| kind")[2]) == [*FAMILIES, *ENCODERS]
    with pytest.raises(CheckpointError, match="architectures"):
        read(architectures=...)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("hidden_act", {"hidden_act": "gelu"}),
        ("hidden_activation", GEMMA | {"hidden_activation": "gelu"}),
        ("attn_logit_softcapping", GEMMA | {"attn_logit_softcapping": 50.0}),
        ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
        ("use_bidirectional_attention", GEMMA | {"use_bidirectional_attention": True}),
        ("rope_type", GEMMA | {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}),
        ("attn_logit_softcapping", GEMMA_PARTS | {"text_config": {"attn_logit_softcapping": 50.0}}),
        ("tie_word_embeddings", GEMMA_PARTS | {"tie_word_embeddings": False}),
        ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("rope_type", {"rope_parameters": {"rope_type": "longrope"}}),
        ("rope_type", {"rope_scaling": {"type": "su", "factor": 2.0}}),
        ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("layer_types", QWEN | {"layer_types": ["full_attention", "chunked_attention"], "use_sliding_window": True}),
        ("layer_types", QWEN | {"layer_types": ["full_attention", "sliding_attention"]}),
        ("layer_types", MISTRAL | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}),
        ("layer_types", MISTRAL | {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}),
        ("attention_bias", {"architectures": ["MistralForCausalLM"], "attention_bias": True}),
        ("mlp_bias", {"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}),
        ("hidden_act", {"architectures": ["GraniteMoeForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}),
        ("layer_types", {"architectures": ["GraniteMoeSharedForCausalLM"], "layer_types": ["linear_attention"] * 2}),
        ("layer_types", {"architectures": ["SmolLM3ForCausalLM"], "layer_types": ["sliding_attention"] * 2}),
        ("hidden_act", {"architectures": ["GemmaForCausalLM"]}),
        ("use_bidirectional_attention", {"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True}),
        ("rope_type", {"architectures": ["Glm4ForCausalLM"], "rope_scaling": {"rope_type": "longrope"}}),
        ("qk_norm_type", {"architectures": ["MiniMaxM2ForCausalLM"], "qk_norm_type": "per_head"}),
        ("layer_types", {"architectures": ["Olmo2ForCausalLM"], "layer_types": ["sliding_attention"] * 2}),
        ("rope_type", {"architectures": ["Olmo3ForCausalLM"], "rope_parameters": {"rope_type": "yarn"}}),
        ("n_group", {"architectures": ["Glm4MoeForCausalLM"], "n_group": 2}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=field) as caught:
        read(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_experts_per_tok", {"architectures": ["GraniteMoeForCausalLM"], "num_experts_per_tok": 9}),
        ("no_rope_layers", {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}),
        ("partial_rotary_factor", {"architectures": ["GlmForCausalLM"], "partial_rotary_factor": 0.01}),
        ("first_k_dense_replace", {"architectures": ["Glm4MoeForCausalLM"], "first_k_dense_replace": 2}),
        ("num_experts_per_tok", {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4}),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        read(**changes)
    assert caught.value.field == field


def windows(**changes: Any) -> list[int | None]:
    return [layer.mixer.window for layer in read(**changes).layers]


def test_windows_of_mistral() -> None:
    assert windows(**MISTRAL, sliding_window=100) == [100, 100]
    assert windows(**MISTRAL, sliding_window=None) == [None, None]
    assert windows(**MISTRAL) == [4096, 4096]
    assert read(**MISTRAL, sliding_window=100).max_position == 512


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_of_qwen(architecture: str) -> None:
    qwen = {"architectures": [architecture], "sliding_window": 64}
    assert windows(**qwen, use_sliding_window=False, max_window_layers=1) == [None, None]
    assert windows(**qwen, max_window_layers=1) == [None, None]
    assert windows(**qwen, use_sliding_window=True, max_window_layers=2) == [None, None]
    assert windows(**qwen, use_sliding_window=True, max_window_layers=1) == [None, 64]
    assert windows(**qwen, use_sliding_window=True, max_window_layers=0) == [64, 64]
    kinds = ["sliding_attention", "full_attention"]
    assert windows(**qwen, use_sliding_window=True, layer_types=kinds) == [64, None]
    assert windows(**qwen | {"sliding_window": None}, use_sliding_window=True, max_window_layers=0) == [None, None]
    assert windows(**qwen | {"sliding_window": ...}, use_sliding_window=True, max_window_layers=0) == [4096, 4096]


def test_windows_and_rotations_of_gemma3() -> None:
    """In the older dialect and with what it leaves out, in the newer one, and layer by layer."""
    older = read(**GEMMA, num_hidden_layers=7, sliding_window=8, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert [layer.mixer.window for layer in older.layers] == [8, 8, 8, 8, 8, None, 8]
    assert older.layers[5].mixer.rope == Rope(1e6, LinearScaling(8.0))
    assert older.layers[6].mixer.rope == Rope(1e4)
    assert older.layers[0].mixer.score_scale == 256**-0.5
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    newer = read(**GEMMA, num_hidden_layers=7, sliding_window=8, rope_parameters=parameters, layer_types=kinds)
    assert newer == older
    assert windows(**GEMMA, sliding_window_pattern=2) == [4096, None]


def test_gemma2_leaves_out_what_is_its_default() -> None:
    """Soft caps too, and null is for none."""
    spec, _ = build({"architectures": ["Gemma2ForCausalLM"]})
    config = Gemma2Config()
    attention = spec.layers[0].mixer
    assert (attention.num_heads, attention.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert (attention.head_dim, spec.vocab_size) == (config.head_dim, config.vocab_size)
    assert (attention.soft_cap, spec.logit_cap) == (config.attn_logit_softcapping, config.final_logit_softcapping)
    assert spec.max_position == config.max_position_embeddings
    kinds = ["full_attention" if layer.mixer.window is None else "sliding_attention" for layer in spec.layers]
    assert kinds == config.layer_types
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec, _ = build({"architectures": ["Gemma2ForCausalLM"], **caps})
    assert spec.logit_cap is None
    assert {layer.mixer.soft_cap for layer in spec.layers} == {None}
    with pytest.raises(CheckpointError) as wrong:
        build({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1.0})
    assert wrong.value.field == "attn_logit_softcapping"


def test_gemma3_leaves_out_what_is_its_default() -> None:
    """The text part of the 4B model's configuration, as released."""
    text: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec, weight_map = build({**GEMMA_PARTS, "text_config": text})
    config = Gemma3TextConfig(**text)
    attention = spec.layers[0].mixer
    assert (attention.num_heads, attention.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert (attention.head_dim, spec.vocab_size) == (config.head_dim, config.vocab_size)
    assert spec.max_position == config.max_position_embeddings
    assert spec.embedding_scale == 2560**0.5
    kinds = ["full_attention" if layer.mixer.window is None else "sliding_attention" for layer in spec.layers]
    assert kinds == config.layer_types
    assert spec.tied_head
    assert weight_map["norm.weight"] == ("language_model.model.norm.weight",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", ...),
        ("hidden_size", None),
        ("num_hidden_layers", "2"),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("intermediate_size", 12.5),
        ("max_position_embeddings", True),
        ("rms_norm_eps", "tiny"),
        ("rms_norm_eps", -1.0),
        ("tie_word_embeddings", 1),
        ("head_dim", 15),
        ("rope_parameters", [1]),
        ("rope_theta", float("nan")),
        ("layer_types", "full_attention"),
        ("max_window_layers", -1),
        ("sliding_window", 0),
        ("hidden_size", 66),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    named = "head_dim" if (field, value) == ("hidden_size", 66) else field
    with pytest.raises(CheckpointError, match=named):
        read(**QWEN | {"use_sliding_window": True, "head_dim": ...} | {field: value})


def test_layer_types_are_as_many_as_layers() -> None:
    with pytest.raises(CheckpointError, match="each of 2 layers, got 3"):
        read(**GEMMA, layer_types=["full_attention"] * 3)


@pytest.mark.parametrize("field", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_field_of_a_scaling_is_named(field: str) -> None:
    parameters = {name: value for name, value in LLAMA3_ROPE.items() if name != field}
    with pytest.raises(CheckpointError, match=rf"rope_parameters\.{field}"):
        read(rope_parameters=parameters)
