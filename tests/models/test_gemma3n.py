"""Gemma 3n: published configurations, ranks and stages that cannot share it, and refusals."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest

from quire.errors import CheckpointError, ConfigError, UnsupportedModel
from quire.models.families import build
from quire.models.specs.parameter_estimate import estimate_parameters
from quire.models.specs.sharding import Share, shard_spec
from quire.models.specs.spec import AltUp, Attention, GatedMLP, ModelSpec, RMSNorm
from quire.models.specs.stage_spec import divide, most_stages

# The language model of E2B; what is not stated is a default.
TEXT: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "intermediate_size": [8192] * 30,
    "laurel_rank": 64,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "model_type": "gemma3n",
    "text_config": TEXT,
}


def read(**text: Any) -> ModelSpec:
    return build(PUBLISHED | {"text_config": TEXT | text})[0]


def test_as_published() -> None:
    spec, names = build(PUBLISHED)
    assert spec.alt_up == AltUp(4, 64, RMSNorm(1e-6, wide=True))
    assert spec.logit_cap == 30.0
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    assert [mixer.window for mixer in mixers[:5]] == [512, 512, 512, 512, None]
    assert [mixer.source for mixer in mixers[19:25]] == [None, 18, 18, 18, 18, 19]
    cutoffs = [layer.ffn.cutoff for layer in spec.layers if isinstance(layer.ffn, GatedMLP)]
    assert cutoffs == [NormalDist().inv_cdf(0.95)] * 10 + [None] * 20
    assert names["layers.19.mixer.qkv.weight"][0] == "model.language_model.layers.19.self_attn.q_proj.weight"
    assert "layers.20.mixer.qkv.weight" not in names
    # 4.46 billion with the tables of per-layer inputs, without the encoders of images and sounds.
    assert estimate_parameters(spec).total == pytest.approx(4.46e9, rel=0.01)


def test_sparse_gates_are_a_default() -> None:
    """Of the first ten layers in models of more."""
    stated = read(activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20)
    assert read(activation_sparsity_pattern=None) == stated
    small = {"num_hidden_layers": 10, "num_kv_shared_layers": 0, "layer_types": None, "intermediate_size": 64}
    layers = read(**small, activation_sparsity_pattern=None).layers
    assert {layer.ffn for layer in layers} == {GatedMLP(64, activation="gelu_tanh")}


def test_neither_ranks_nor_stages_share_it() -> None:
    """Gates are cut off by the mean of all of them, and one hidden state of a token travels between stages."""
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1, got 2: the gates of layer 0"):
        shard_spec(read(), Share(0, 2))
    assert most_stages(read()) == 1
    with pytest.raises(ConfigError, match="at most 1, got 2: the model has 30 layers with several hidden states"):
        divide(read(), 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_sparsity_pattern", [0.5] * 29),
        ("activation_sparsity_pattern", [1.0] * 30),
        ("activation_sparsity_pattern", 0.5),
        ("intermediate_size", [64] * 3),
        ("intermediate_size", [0] * 30),
        ("altup_num_inputs", 1),
        ("altup_num_inputs", 10**6),
        ("laurel_rank", 0),
        ("num_kv_shared_layers", 29),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        read(**{field: value})
    assert caught.value.field == field


def test_another_active_state_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="altup_active_idx is 1"):
        read(altup_active_idx=1)
