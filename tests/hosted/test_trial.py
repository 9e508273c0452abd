"""The examination of transformers' models: what it describes, and each reason for a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    masking_utils,
)

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.hosted.choice import read_decoder
from quire.models.hosted.interface import HostedMask
from quire.models.hosted.trial import _recognise, examine
from quire.models.specs.hosted_spec import Hindrance, HostedSpec
from quire.models.specs.spec import LayerGroup, TokenCacheShape
from tests.hosted.small_configs import small_config

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def config_of(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    """Return the content of a `config.json`."""
    made = CONFIG_MAPPING[model_type](**{**SHAPE, **fields}).to_dict()
    return {**made, "architectures": [architecture], "model_type": model_type}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        examine(config)
    return str(caught.value)


# ---- descriptions ----


def test_windows_come_from_masks_and_make_groups() -> None:
    spec = examine(config_of("cohere2", "Cohere2ForCausalLM", num_key_value_heads=2, sliding_window=9))
    assert [call.window for call in spec.attention] == [9, 9, 9, None]
    assert spec.cache_groups == (LayerGroup(3, TokenCacheShape(2, 16, 9)), LayerGroup(1, TokenCacheShape(2, 16)))
    assert spec.cache_positions == ((0, 0), (0, 1), (0, 2), (1, 0))
    assert (spec.vocab_size, spec.width, spec.num_layers, spec.max_position) == (211, 64, 4, 256)


def test_chunks_are_told_from_windows() -> None:
    layer_types = ["chunked_attention", "full_attention"] * 2
    fields = {"num_key_value_heads": 2, "head_dim": 16, "attention_chunk_size": 8, "layer_types": layer_types}
    config = config_of("llama4_text", "Llama4ForCausalLM", **fields, intermediate_size_mlp=96, num_local_experts=2)
    spec = examine(config)
    assert [(call.window, call.chunk) for call in spec.attention] == [(None, 8), (None, None)] * 2
    assert spec.body == "model"


def test_heads_of_two_widths_are_padded_and_said() -> None:
    fields = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 17, "v_head_dim": 16}
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    spec = examine(config_of("deepseek_v3", "DeepseekV3ForCausalLM", num_key_value_heads=4, **fields, **experts))
    assert {(call.key_width, call.value_width, call.head_dim) for call in spec.attention} == {(25, 16, 26)}
    assert spec.cache_groups == (LayerGroup(4, TokenCacheShape(4, 26)),)
    assert "Keys of 25 and values of 16 numbers a head are stored in heads of 26" in spec.notes[1]
    assert spec.parameters.experts > 0


def test_scales_caps_and_sinks_are_those_of_the_calls() -> None:
    capped = config_of(
        "gemma2", "Gemma2ForCausalLM", head_dim=16, query_pre_attn_scalar=64, attn_logit_softcapping=20.0
    )
    assert {(call.scale, call.soft_cap, call.sinks) for call in examine(capped).attention} == {(64**-0.5, 20.0, False)}
    sunk = config_of("gpt_oss", "GptOssForCausalLM", head_dim=16, num_local_experts=4, num_key_value_heads=2)
    assert all(call.sinks for call in examine(sunk).attention)


def test_layers_inside_of_the_base_model_are_found() -> None:
    fields = {"ffn_dim": 96, "word_embed_proj_dim": 64}
    assert examine(config_of("opt", "OPTForCausalLM", **fields)).body == "model.decoder"


def test_the_outermost_layers_that_take_positions_are_taken() -> None:
    """Those around them pass positions on without naming them."""
    config = small_config("moss_transcribe_diarize").to_dict()
    architecture = "MossTranscribeDiarizeForConditionalGeneration"
    assert examine({**config, "architectures": [architecture]}).body == "model.language_model"


def test_the_text_of_a_model_of_images_has_a_configuration_of_its_own() -> None:
    """Transformers saves it for a causal language model that it builds of the whole configuration."""
    config = small_config("emu3").get_text_config().to_dict()
    assert config["model_type"] != "emu3"
    assert examine({**config, "architectures": ["Emu3ForCausalLM"]}).body == "model"
    assert "(encoder)" in refusal({**config, "architectures": ["Emu3ForConditionalGeneration"]})


def test_a_layer_that_runs_in_loops_has_a_cache_for_each() -> None:
    spec = examine(small_config("dory").to_dict() | {"architectures": ["DoryForCausalLM"]})
    assert [call.module for call in spec.attention] == [f"model.layers.{idx}.self_attn" for idx in (0, 1, 2, 1, 2, 3)]


def test_fields_that_no_family_implements_are_left_to_the_modules() -> None:
    """A decoder that is built to attend to an encoder's rows runs without them, as in transformers."""
    config = config_of("bert-generation", "BertGenerationDecoder", is_decoder=True, add_cross_attention=True)
    assert isinstance(read_decoder(config, "transformers").spec, HostedSpec)


def test_no_weight_has_memory() -> None:
    config = config_of("olmo2", "Olmo2ForCausalLM", hidden_size=8192, intermediate_size=1 << 17, vocab_size=1 << 18)
    spec = examine(config)
    assert spec.parameters.total > 16e9
    assert spec.most_columns == 1 << 18


# ---- refusals ----

REFUSED: dict[str, tuple[Hindrance, str, str, dict[str, Any], str]] = {
    "declared state": ("state", "mamba", "MambaForCausalLM", {}, "keep a state"),
    "state that is not declared": (
        *("state", "lfm2", "Lfm2ForCausalLM"),
        {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"] * 2},
        "rows of a step are mixed",
    ),
    "a cache that depends on steps": (
        *("state", "dory", "DoryForCausalLM"),
        {"head_dim": 16, "n_input_layers": 1, "n_output_layers": 1, "recurrent_kv_cache_mode": "last_loop"},
        "with transformers' cache, other keys, values or queries reach attention",
    ),
    "own attention": ("attention", "falcon", "FalconForCausalLM", {}, "has no interface"),
    "attention that adds masks": (*("attention", "bloom", "BloomForCausalLM"), {}, "its own code reads masks"),
    "own masks": ("mask", "doge", "DogeForCausalLM", {"num_key_value_heads": 2}, "HostedMask"),
    "bidirectional": ("encoder", "bert", "BertLMHeadModel", {}, "tokens see tokens after them"),
    "no causal model": ("encoder", "t5", "T5ForConditionalGeneration", {}, "no causal language model"),
    "positions that cannot be given": (
        *("encoder", "bart", "BartForCausalLM"),
        {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
        "no others can be given",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_its_reason(case: str) -> None:
    hindrance, model_type, architecture, fields, detail = REFUSED[case]
    message = refusal(config_of(model_type, architecture, **fields))
    assert f"({hindrance})" in message
    assert detail in message
    assert architecture in message


def test_what_transformers_does_not_know_is_refused_without_running_its_code() -> None:
    message = refusal({"architectures": ["NewForCausalLM"], "model_type": "new", "auto_map": {"AutoModel": "x.Y"}})
    assert "does not know the model_type 'new'" in message
    assert "code of its own, which is never run" in message


def test_a_class_of_another_name_is_refused() -> None:
    assert "(encoder)" in refusal(config_of("olmo2", "Olmo2ForSequenceClassification"))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_hidden_layers", 1 << 20, "num_hidden_layers is 1048576"),
        ("hidden_size", 1 << 40, "hidden_size is 1099511627776"),
        ("head_dim", 1 << 30, "a range of more than 16,777,216 numbers is made"),
        ("head_dim", 63, "RoPE requires an even rotary dimension"),
        ("hidden_size", -64, "transformers"),
        ("num_attention_heads", 0, "transformers"),
        ("hidden_act", "no such", "transformers"),
        ("rope_parameters", {"rope_type": "no such", "rope_theta": 1e4}, "transformers"),
        ("vocab_size", "many", "transformers"),
    ],
)
def test_a_bad_configuration_is_an_error_that_quotes_transformers(field: str, value: Any, expected: str) -> None:
    config = {**config_of("olmo2", "Olmo2ForCausalLM"), field: value}
    with pytest.raises(CheckpointError, match=expected):
        examine(config)


# ---- masks ----


def recognised(function: Callable[..., Any], size: int | None = None) -> HostedMask:
    return _recognise({"mask_function": function, "local_size": size})


def test_masks_are_recognised_by_what_they_let_see() -> None:
    causal = masking_utils.causal_mask_function
    assert recognised(causal) == recognised(causal, 100) == HostedMask()
    assert recognised(masking_utils.sliding_window_causal_mask_function(100), 100) == HostedMask(window=100)
    assert recognised(masking_utils.chunked_causal_mask_function(100, torch.zeros(1, dtype=torch.int64)), 100) == (
        HostedMask(chunk=100)
    )
    # The window that is named is another one.
    assert recognised(masking_utils.sliding_window_causal_mask_function(99), 100).refusal is not None


def test_overlays_are_refused() -> None:
    def prefix(*place: Tensor) -> Tensor:
        return place[-1] < 3

    def gap(*place: Tensor) -> Tensor:
        return place[-1] != 7

    def by_table(*place: Tensor) -> Tensor:
        return torch.zeros(6, dtype=torch.bool)[place[-1]]

    causal = masking_utils.causal_mask_function
    seen = {
        "prefix": recognised(masking_utils.or_masks(causal, prefix)),
        "gap": recognised(masking_utils.and_masks(causal, gap)),
        "table": recognised(masking_utils.or_masks(causal, by_table)),
        "bidirectional": recognised(masking_utils.bidirectional_mask_function),
    }
    reasons = {name: mask.refusal[0] for name, mask in seen.items() if mask.refusal is not None}
    assert reasons == {"prefix": "encoder", "gap": "mask", "table": "mask", "bidirectional": "encoder"}
