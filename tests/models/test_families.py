"""Reading config.json: both dialects of rotation, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.families import FAMILIES, build
from quire.models.rope import inverse_frequencies
from quire.models.spec import Llama3Scaling, ModelSpec, Rope
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
    ],
    ids=lambda parameters: str(parameters["rope_type"]),
)
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(parameters)
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rope = read(rope_parameters=parameters, max_position_embeddings=256).layers[0].mixer.rope
    found, scale = inverse_frequencies(rope, 128)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert scale == pytest.approx(factor, rel=1e-12)


def test_longest_context() -> None:
    assert read().max_position == 512
    # A YaRN checkpoint may state the length of the original model only.
    assert read(rope_parameters=YARN_ROPE, max_position_embeddings=64).max_position == 256
    # Windowed attention is full attention up to the window, and we go no further.
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(**mistral, sliding_window=100).max_position == 100
    assert read(**mistral, sliding_window=None).max_position == 512


def test_head_dim_is_divided_out_or_given() -> None:
    assert read().layers[0].mixer.head_dim == 16
    assert read(head_dim=40).layers[0].mixer.head_dim == 40
    assert read(head_dim=None).layers[0].mixer.head_dim == 16
    assert read(num_key_value_heads=...).layers[0].mixer.num_kv_heads == 4


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM") as caught:
        read(architectures=["MambaForCausalLM"])
    assert all(name in str(caught.value) for name in FAMILIES)
    with pytest.raises(CheckpointError, match="architectures"):
        read(architectures=...)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("hidden_act", {"hidden_act": "gelu"}),
        ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("rope_type", {"rope_parameters": {"rope_type": "longrope"}}),
        ("rope_type", {"rope_scaling": {"type": "su", "factor": 2.0}}),
        ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
        (
            "use_sliding_window",
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 1,
            },
        ),
        ("attention_bias", {"architectures": ["MistralForCausalLM"], "attention_bias": True}),
        ("mlp_bias", {"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=field) as caught:
        read(**changes)
    assert caught.value.field == field


def test_a_window_that_reaches_no_layer_is_no_window() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    read(**qwen, use_sliding_window=False, max_window_layers=1)
    read(**qwen, use_sliding_window=True, max_window_layers=2)


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
        ("hidden_size", 66),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    named = "head_dim" if (field, value) == ("hidden_size", 66) else field
    with pytest.raises(CheckpointError, match=named):
        read(**{field: value})


@pytest.mark.parametrize("field", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_field_of_a_scaling_is_named(field: str) -> None:
    parameters = {name: value for name, value in LLAMA3_ROPE.items() if name != field}
    with pytest.raises(CheckpointError, match=rf"rope_parameters\.{field}"):
        read(rope_parameters=parameters)
