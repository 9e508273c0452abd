"""Gemma 4: shapes of two dialects, a checkpoint with a vision part, roundings, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from quire.models.modules.norms import Norm
from quire.models.modules.per_layer_inputs import PerLayerEmbedding
from quire.models.specs.rotations import ProportionalScaling, Rope
from quire.models.specs.spec import LayerGroup, ModelSpec, RMSNorm, TokenCacheShape
from quire.ops.reference.reference_ops import ReferenceOps
from tests.models.test_conformance import assert_same
from tests.models.tiny import CASES, SHAPE, PagedRun, make_tiny, random_tokens, reference_logits

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# As released configurations state it: a small one whose last two layers read the cache of others.
RELEASED: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 100,
    "vocab_size_per_layer_input": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 30.0,
}


def read(**changes: Any) -> ModelSpec:
    """Read RELEASED with changes; a change to `...` removes the field."""
    fields = {"architectures": ["Gemma4ForCausalLM"]} | RELEASED | changes
    return build({name: value for name, value in fields.items() if value is not ...})[0]


def test_layers_that_share_keep_nothing() -> None:
    decoder = make_tiny("gemma4").decoder
    assert decoder.cache_groups == (LayerGroup(3, TokenCacheShape(2, 16, 9)), LayerGroup(1, TokenCacheShape(2, 32)))
    assert [layer.mixer.source for layer in decoder.spec.layers] == [None, None, None, None, 3, 3, 2, 2]
    assert [layer.ffn.width for layer in decoder.spec.layers] == [96] * 4 + [192] * 4
    assert "layers.4.mixer.qkv.weight" not in decoder.weights.shapes()


@pytest.mark.parametrize("is_kv_same", [False, True])
def test_both_dialects_of_shapes(is_kv_same: bool) -> None:
    """What transformers writes today, layer by layer, is what released checkpoints state of a kind of layer."""
    written = json.loads(Gemma4TextConfig(**RELEASED, attention_k_eq_v=is_kv_same).to_json_string())
    assert "global_head_dim" not in written
    newer = build({**written, "architectures": ["Gemma4ForCausalLM"]})
    older = build({**RELEASED, "architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": is_kv_same})
    assert newer == older
    shapes = [(layer.mixer.num_kv_heads, layer.mixer.head_dim) for layer in older[0].layers]
    assert shapes == [(2, 16), (1 if is_kv_same else 2, 32)] * 2
    same = json.loads(Gemma4TextConfig(**RELEASED | {"global_head_dim": 16}).to_json_string())
    assert same["per_layer_config"] == {}
    assert build({**same, "architectures": ["Gemma4ForCausalLM"]})[0] == read(global_head_dim=16)
    many = RELEASED | {"num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6}
    written = json.loads(Gemma4TextConfig(**many).to_json_string())  # layers are called 01, 03 and so on
    assert build({**written, "architectures": ["Gemma4ForCausalLM"]})[0] == read(**many)


def test_what_configurations_leave_out() -> None:
    spec = build({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {"num_hidden_layers": 32}})[0]
    theirs = Gemma4TextConfig(num_hidden_layers=32)
    kinds = ["full_attention" if layer.mixer.window is None else "sliding_attention" for layer in spec.layers]
    assert kinds == theirs.layer_types
    full, near = spec.layers[5].mixer, spec.layers[0].mixer
    assert full.rope == Rope(1e6, ProportionalScaling(0.25, 1.0))
    parameters = {"full_attention": {"rope_type": "default"}}
    assert [layer.mixer.rope for layer in read(rope_parameters=parameters).layers[:2]] == [Rope(1e4), Rope(1e4)]
    assert (near.rope, near.window) == (Rope(1e4), theirs.sliding_window)
    assert (full.num_kv_heads, full.head_dim, near.head_dim) == (4, theirs.per_layer_config[5].head_dim, 256)
    assert spec.per_layer_inputs is not None
    assert spec.per_layer_inputs.width == theirs.hidden_size_per_layer_input
    assert (spec.vocab_size, spec.max_position) == (theirs.vocab_size, theirs.max_position_embeddings)


def test_the_language_model_of_a_checkpoint_with_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers saves it, under the names of the released checkpoints; the rest of its tensors is left out."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma4Config(
        text_config=SHAPE | CASES["gemma4"][2] | {"initializer_range": 0.2},
        vision_config=vision | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
    )
    torch.manual_seed(3)
    reference = Gemma4ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    decoder = load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32)
    assert "vision_tower" in caplog.text
    token_ids = random_tokens(45)
    with torch.inference_mode():
        run = PagedRun(decoder)
        found = torch.cat([run.step({0: part})[0] for part in (token_ids[:30], token_ids[30:])])
    assert_same(found, reference_logits(reference, token_ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_round_where_those_of_transformers_do(dtype: torch.dtype) -> None:
    theirs = Gemma4RMSNorm(64, eps=1e-6).to(dtype)
    ours = Norm(RMSNorm(1e-6, wide=True), 64, ReferenceOps(), dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((64,), (500, 64)))
    ours.slots["weight"].fill(weight)
    with torch.inference_mode():
        theirs.weight.copy_(weight)
        found, expected = ours(x), theirs(x)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:  # a last bit of float32 tips hardly any rounding
        assert (found != expected).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_are_told_what_those_of_transformers_are(dtype: torch.dtype) -> None:
    tiny = make_tiny("gemma4", dtype)
    module: torch.nn.Module = tiny.reference
    module.to(dtype)
    reference = tiny.reference.model
    inputs = tiny.decoder.spec.per_layer_inputs
    assert inputs is not None
    ours = PerLayerEmbedding(inputs, 8, 64, ReferenceOps(), dtype, CPU, inputs.vocab_size)
    ours.slots["embedding.weight"].fill(reference.embed_tokens_per_layer.weight)
    ours.slots["projection.weight"].fill(reference.per_layer_model_projection.weight)
    ours.slots["norm.weight"].fill(reference.per_layer_projection_norm.weight)
    token_ids = torch.tensor(random_tokens(100))
    with torch.inference_mode():
        x = reference.embed_tokens(token_ids)
        expected = reference.project_per_layer_inputs(x[None], reference.get_per_layer_inputs(token_ids[None]))[0]
        found = ours(token_ids, x)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    if dtype != torch.float32:
        assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("use_bidirectional_attention", {"use_bidirectional_attention": "all"}),
        ("attention_bias", {"attention_bias": True}),
        ("hidden_activation", {"hidden_activation": "gelu"}),
        ("layer_types", {"layer_types": ["chunked_attention"] * 3 + ["full_attention"]}),
        ("per_layer_config", {"per_layer_config": {"1": {"intermediate_size": 8}}}),
        ("rope_type", {"rope_parameters": {"rope_type": "default"}}),
        ("partial_rotary_factor", {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}),
        ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=field) as caught:
        read(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("top_k_experts", {"enable_moe_block": True, "num_experts": 4}),
        ("num_kv_shared_layers", {"num_kv_shared_layers": 3}),
        ("num_kv_shared_layers", {"num_kv_shared_layers": 9}),
        ("num_kv_shared_layers", {"num_kv_shared_layers": -1}),
        ("vocab_size_per_layer_input", {"vocab_size_per_layer_input": 99}),
        ("global_head_dim", {"global_head_dim": "32"}),
        ("head_dim", {"global_head_dim": 33}),
        ("num_key_value_heads", {"attention_k_eq_v": True, "num_global_key_value_heads": 3}),
        ("per_layer_config", {"per_layer_config": {"4": {"head_dim": 32}}}),
        ("per_layer_config", {"per_layer_config": {"one": {"head_dim": 32}}}),
        ("per_layer_config", {"per_layer_config": {"1": {"head_dim": 32}}}),
        (
            "partial_rotary_factor",
            {"rope_parameters": {"full_attention": {"rope_type": "proportional"} | {"partial_rotary_factor": 1.5}}},
        ),
    ],
)
def test_a_wrong_field_is_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        read(**changes)
    assert caught.value.field == field
