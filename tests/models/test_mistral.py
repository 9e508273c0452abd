"""Mistral's language models inside of models for images, and the temperature of Ministral 3."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import Mistral3Config, Mistral3ForConditionalGeneration
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.families import build
from quire.models.modules.decoder import Decoder
from quire.models.modules.rope import query_scales
from quire.models.specs.rotations import Temperature
from quire.ops import make_ops
from tests.models.llama_layout_cases import LLAMA_LAYOUT_CASES
from tests.models.stored_tensors import stored_tensors
from tests.models.tiny import CASES, SHAPE, PagedRun, fill, random_tokens, reference_logits

CPU = torch.device("cpu")
MINISTRAL3: dict[str, Any] = SHAPE | LLAMA_LAYOUT_CASES["ministral3"][2]
VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize(
    ("kind", "case", "changes"),
    [
        ("mistral", "mistral-head-dim", {"tie_word_embeddings": False}),
        ("ministral3", "ministral3", {"tie_word_embeddings": True}),
    ],
)
def test_the_language_model_of_a_model_for_images(kind: str, case: str, changes: dict[str, Any]) -> None:
    text = SHAPE | CASES[case][2] | {"model_type": kind} | changes
    config = Mistral3Config(text_config=text, vision_config=VISION, image_token_index=0, **changes)
    torch.manual_seed(3)
    model = Mistral3ForConditionalGeneration(config).eval()
    model.config.architectures = [type(model).__name__]
    spec, names = build(json.loads(model.config.to_json_string(use_diff=False)))
    decoder = Decoder(spec, ops=make_ops(CPU), dtype=torch.float32, device=CPU)
    fill(decoder, names, stored_tensors(model))
    token_ids = [1 + token % 200 for token in random_tokens(30)]
    expected = reference_logits(model, token_ids)
    torch.testing.assert_close(PagedRun(decoder).step({0: token_ids})[0], expected, rtol=1e-4, atol=1e-5)


def test_an_unknown_language_model_is_refused() -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}}
    with pytest.raises(UnsupportedModel, match="model_type is 'mistral4', but only 'mistral' and 'ministral3'"):
        build(config)


def test_scales_of_queries_are_those_of_transformers() -> None:
    positions = torch.tensor([0, 8, 9, 10, 19, 20, 99])
    expected = get_llama_4_attn_scale(positions[None], 0.5, 10)
    torch.testing.assert_close(query_scales(Temperature(10.0, 0.5, offset=0), positions), expected[0, 0, :, None])


def test_a_temperature_needs_the_original_length() -> None:
    rope = {name: value for name, value in MINISTRAL3["rope_parameters"].items() if name[:8] != "original"}
    config = MINISTRAL3 | {"architectures": ["Ministral3ForCausalLM"]}
    with pytest.raises(CheckpointError, match="original_max_position_embeddings"):
        build(config | {"rope_parameters": rope})
    plain = {"rope_type": "default", "rope_theta": 1000.0}
    assert build(config | {"rope_parameters": plain})[0].layers[0].mixer.temperature is None
