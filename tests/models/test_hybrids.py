"""Reading the configurations of models with recurrent layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import FalconH1Config, Lfm2Config, NemotronHConfig, NemotronHForCausalLM
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from quire.config import CACHE_DTYPES
from quire.errors import CheckpointError, UnsupportedModel
from quire.models.families import build
from quire.models.specs.cache_layout import cache_specs
from quire.models.specs.rotations import Rope
from quire.models.specs.spec import Attention, Mamba2, ModelSpec, PlainMLP, RMSNorm, ShortConv
from tests.models.published import CONFIGS, rope_parameter
from tests.models.test_conformance import assert_same
from tests.models.tiny import PagedRun, make_tiny, random_tokens, reference_logits

LFM2 = {"architectures": ["Lfm2ForCausalLM"]}
GRANITE = CONFIGS["Granite 4.0 H-350M"]
FALCON = CONFIGS["Falcon-H1 0.5B"]
NEMOTRON = CONFIGS["Nemotron Nano 9B v2"]
BAMBA, QWEN3_NEXT = CONFIGS["Bamba 9B"], CONFIGS["Qwen3-Next 80B A3B"]
NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}


def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
    """Read a configuration with changes; a change to `...` removes the field."""
    return build({name: value for name, value in (config | changes).items() if value is not ...})[0]


def kinds(spec: ModelSpec) -> list[type]:
    return [type(layer.mixer) for layer in spec.layers]


def test_lfm2_leaves_out_what_is_its_default() -> None:
    spec, config = read(LFM2), Lfm2Config()
    assert (spec.vocab_size, spec.width) == (config.vocab_size, config.hidden_size)
    assert (spec.max_position, spec.tied_head) == (config.max_position_embeddings, config.tie_word_embeddings)
    assert kinds(spec) == [Attention] * config.num_hidden_layers
    assert spec.layers[0].mixer.rope == Rope(rope_parameter(config, "rope_theta"))
    assert spec.norm.eps == spec.layers[0].mixer.qk_norm.eps == config.norm_eps
    (conv,) = {layer.mixer for layer in read(LFM2, full_attn_idxs=[]).layers}
    assert conv == ShortConv(config.hidden_size, config.conv_L_cache, config.conv_bias)


def test_lfm2_as_released() -> None:
    """The 1.2B model: attention in 6 of 16 layers, and two thirds of what is stated as the MLP's width."""
    spec = read(CONFIGS["LFM2 1.2B"])
    assert [idx for idx, kind in enumerate(kinds(spec)) if kind is Attention] == [2, 5, 8, 10, 12, 14]
    assert spec.layers[0].ffn.width == 8192
    listed = ["full_attention" if kind is Attention else "conv" for kind in kinds(spec)]
    assert read(CONFIGS["LFM2 1.2B"], full_attn_idxs=..., layer_types=listed) == spec
    assert not read(CONFIGS["LFM2 1.2B"], tie_embedding=False).tied_head


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"intermediate_size": 1000},
        {"block_ff_dim": 777},
        {"intermediate_size": 1000, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 7},
        {"intermediate_size": 1000, "block_ffn_dim_multiplier": None},
        {"intermediate_size": 1000, "block_auto_adjust_ff_dim": False},
    ],
    ids=str,
)
def test_widths_of_lfm2_are_those_of_transformers(changes: dict[str, Any]) -> None:
    # transformers' own type check refuses the null that its code provides for.
    config = Lfm2Config(hidden_size=8, **{name: value for name, value in changes.items() if value is not None})
    for name, value in changes.items():
        if value is None:
            object.__setattr__(config, name, value)
    assert read(LFM2, **changes).layers[0].ffn.width == Lfm2MLP(config).w1.out_features


def test_granite_as_released() -> None:
    spec = read(GRANITE, position_embedding_type="nope", attention_multiplier=0.015625, logits_scaling=4)
    assert [idx for idx, kind in enumerate(kinds(spec)) if kind is Attention] == [10, 13, 17, 27]
    mamba, attention = spec.layers[0].mixer, spec.layers[10].mixer
    assert mamba == Mamba2(48, 32, 1, 128, 4, RMSNorm(spec.norm.eps))
    assert (attention.rope, attention.score_scale, attention.head_dim) == (None, 0.015625, 64)
    assert (spec.logit_scale, spec.layers[0].ffn.width) == (0.25, 2048)
    newer = {"mamba": "linear_attention", "attention": "full_attention"}
    renamed = [newer[kind] for kind in GRANITE["layer_types"]]
    assert kinds(read(GRANITE, layer_types=renamed, position_embedding_type=None)) == kinds(spec)
    assert read(GRANITE, position_embedding_type="rope").layers[10].mixer.rope == Rope(10000.0)


def test_falcon_as_released() -> None:
    """Every layer has both mixers; what multiplies inputs and keys is multiplied where nothing is rounded."""
    spec = read(FALCON, rope_theta=1e11)
    (layer,) = set(spec.layers)
    attention, mamba = layer.parts
    assert (len(spec.layers), layer.mixer.scales) == (36, (0.9375, 0.23570226039551587))
    assert attention == Attention(8, 2, 64, Rope(1e11), score_scale=0.125 * 0.390625)
    assert mamba == Mamba2(24, 64, 1, 128, 4, None, scales=tuple(1.25 * each for each in FALCON["ssm_multipliers"]))
    assert (layer.ffn.gate_scale, layer.ffn_scale) == tuple(FALCON["mlp_multipliers"])
    assert (spec.embedding_scale, spec.logit_scale) == (5.656854249492381, 0.0390625)
    (doubled,) = {layer.mixer for layer in read(FALCON, attention_in_multiplier=2.0).layers}
    assert doubled.scales == (2 * 0.9375, 0.23570226039551587)
    assert doubled.parts[0].score_scale == 4 * 0.125 * 0.390625
    assert read(FALCON, **NORMED).layers[0].parts[1].norm == spec.norm


def test_bamba_as_released() -> None:
    """Attention in three of 32 layers, in both dialects; half of each of its heads is rotated."""
    spec = read(BAMBA)
    assert [idx for idx, kind in enumerate(kinds(spec)) if kind is Attention] == [9, 18, 27]
    assert spec.layers[0].mixer == Mamba2(128, 64, 1, 128, 4, RMSNorm(spec.norm.eps))
    assert spec.layers[9].mixer.rope == Rope(10000.0, num_turned=64)
    listed = ["attention" if kind is Attention else "mamba" for kind in kinds(spec)]
    assert read(BAMBA, attn_layer_indices=..., layer_types=listed) == spec


def test_nemotron_as_released() -> None:
    """The kinds of layers in each of the three dialects; a layer is one half."""
    spec, names = read(NEMOTRON), {"M": "mamba", "*": "attention", "-": "mlp"}
    pattern = NEMOTRON["hybrid_override_pattern"]
    assert [idx for idx, kind in enumerate(kinds(spec)) if kind is Attention] == [14, 21, 30, 39]
    assert [layer.ffn is None for layer in spec.layers] == [mark != "-" for mark in pattern]
    assert spec.layers[0].mixer == Mamba2(128, 80, 8, 128, 4, RMSNorm(1e-5))
    assert spec.layers[1].ffn == PlainMLP(15680, "relu2")
    older = read(NEMOTRON, hybrid_override_pattern=..., layers_block_type=[names[mark] for mark in pattern])
    names |= {"M": "linear_attention", "*": "full_attention"}
    newer = read(NEMOTRON, hybrid_override_pattern=..., layers_block_type=[names[mark] for mark in pattern])
    assert older == newer == spec


@pytest.mark.parametrize(("stated", "num_heads", "inner"), [(1536, 24, 1536), (None, 32, 2048), (..., 16, 1024)])
def test_the_inner_width_of_falcon_is_that_of_transformers(stated: Any, num_heads: int, inner: int) -> None:
    changes = {"mamba_d_ssm": stated, "mamba_n_heads": num_heads}
    config = FalconH1Config(**{name: value for name, value in changes.items() if value is not ...}, hidden_size=1024)
    head_dim = config.mamba_d_head
    assert isinstance(head_dim, int)
    assert read(FALCON, **changes).layers[0].parts[1].inner == inner == num_heads * head_dim


@pytest.mark.parametrize("limit", [..., None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]], ids=str)
def test_steps_without_limits(limit: object) -> None:
    assert read(GRANITE, time_step_limit=limit) == read(GRANITE)


@torch.inference_mode()
def test_steps_of_nemotron_have_the_limits_that_are_stated_for_steps() -> None:
    """`time_step_limit`, which has none; transformers limits prompts by `time_step_min`, and decodes by nothing."""
    tiny, token_ids = make_tiny("nemotron-h"), random_tokens(30)
    limited = {"time_step_min": 1.5}
    assert build(tiny.config | limited)[0] == tiny.decoder.spec
    reference = NemotronHForCausalLM(NemotronHConfig(**tiny.reference.config.to_dict() | limited)).eval()
    reference.load_state_dict(tiny.reference.state_dict())
    found = PagedRun(tiny.decoder).step({0: token_ids})[0]
    assert (reference_logits(reference, token_ids) - found).std() > 0.01 * found.std()
    mixers = [module for module in reference.modules() if hasattr(module, "time_step_limit")]
    for mixer in mixers:
        assert mixer.time_step_limit == (1.5, math.inf)
        mixer.time_step_limit = reference.config.time_step_limit
    assert_same(found, reference_logits(reference, token_ids))
    cache = reference(torch.tensor([token_ids[:20]]), use_cache=True).past_key_values
    for mixer in mixers:
        mixer.time_step_limit = (1.5, math.inf)
    decoded = [reference(torch.tensor([[token]]), cache=cache).logits[0] for token in token_ids[20:]]
    assert_same(found[20:], torch.cat(decoded))


@pytest.mark.parametrize(
    ("field", "config", "changes"),
    [
        ("hidden_act", GRANITE, {"hidden_act": "gelu_pytorch_tanh"}),
        ("position_embedding_type", GRANITE, {"position_embedding_type": "alibi"}),
        ("time_step_limit", GRANITE, {"time_step_limit": [0.001, 0.1]}),
        ("mamba_d_head", GRANITE, {"mamba_d_head": 64}),
        ("layer_types", GRANITE, {"layer_types": ["mamba", "conv"] * 16}),
        ("attention_bias", FALCON, {"attention_bias": True, "attention_in_multiplier": 1.5}),
        ("mamba_proj_bias", FALCON, {"mamba_proj_bias": True}),
        ("mamba_norm_before_gate", FALCON, NORMED | {"mamba_norm_before_gate": True}),
        ("mamba_norm_before_gate", FALCON, NORMED | {"mamba_norm_before_gate": ...}),
        ("mamba_use_mlp", FALCON, {"mamba_use_mlp": False}),
        ("attn_layer_indices", FALCON, {"attn_layer_indices": [3]}),
        ("layer_types", FALCON, {"layer_types": ["full_attention"] * 36}),
        ("hidden_act", FALCON, {"hidden_act": "gelu"}),
        ("time_step_limit", FALCON, {"time_step_limit": [0.001, 0.1]}),
        ("layer_types", LFM2, {"layer_types": ["conv", "sliding_attention"] * 16}),
        ("time_step_limit", NEMOTRON, {"time_step_limit": [0.001, 0.1]}),
        ("time_step_limit", BAMBA, {"time_step_limit": [0.001, 0.1]}),
        ("rope_type", BAMBA, {"rope_parameters": {"rope_type": "proportional"}}),
        ("mlp_hidden_act", NEMOTRON, {"mlp_hidden_act": "silu"}),
        ("moe_latent_size", NEMOTRON, {"moe_latent_size": 1024}),
        ("hybrid_override_pattern", NEMOTRON, {"hybrid_override_pattern": "M-M?"}),
        ("layer_types", NEMOTRON, {"layers_block_type": ["mlp", "conv"]}),
        ("n_group", NEMOTRON, {"hybrid_override_pattern": "ME*", "n_group": 4}),
        ("tie_word_embeddings", NEMOTRON, {"tie_word_embeddings": True}),
        ("norm_topk_prob", QWEN3_NEXT, {"norm_topk_prob": False}),
        ("decoder_sparse_step", QWEN3_NEXT, {"decoder_sparse_step": 2}),
        ("rope_type", LFM2, {"rope_parameters": {"rope_type": "longrope"}}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    field: str, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModel, match=field) as caught:
        read(config, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "config", "changes"),
    [
        ("mamba_n_heads", GRANITE, {"mamba_n_heads": 7}),
        ("mamba_n_heads", GRANITE, {"mamba_n_groups": 5}),
        ("mamba_d_conv", GRANITE, {"mamba_d_conv": 1}),
        ("layer_types", GRANITE, {"layer_types": ["mamba"] * 3}),
        ("residual_multiplier", GRANITE, {"residual_multiplier": 0}),
        ("mamba_n_heads", FALCON, {"mamba_n_heads": 25, "mamba_d_head": "auto"}),
        ("mlp_multipliers", FALCON, {"mlp_multipliers": [1.0]}),
        ("ssm_multipliers", FALCON, {"ssm_multipliers": [1.0, 1.0, -1.0, 1.0, 1.0]}),
        ("ssm_multipliers", FALCON, {"ssm_multipliers": 1.0}),
        ("key_multiplier", FALCON, {"key_multiplier": 0}),
        ("conv_L_cache", LFM2, {"conv_L_cache": 1}),
        ("conv_bias", LFM2, {"conv_bias": "yes"}),
        ("block_ff_dim", LFM2, {"block_ff_dim": -1}),
        ("full_attn_idxs", LFM2, {"full_attn_idxs": [0.5]}),
    ],
)
def test_a_wrong_field_is_named(field: str, config: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        read(config, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize(("config", "changes"), [(LFM2, {"full_attn_idxs": []}), (GRANITE, {"layer_types": ...})])
def test_a_pool_needs_tokens_to_be_sized_by(config: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="no attention"):
        cache_specs(read(config, **changes), 16, CACHE_DTYPES["bfloat16"], 2)
