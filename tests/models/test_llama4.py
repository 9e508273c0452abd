"""Llama 4: configurations, interleaved rotation, and a checkpoint with a vision part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding, apply_rotary_emb

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from quire.models.modules.blocks import turning_order
from quire.models.modules.rope import RotaryEmbedding, query_scales
from quire.models.specs.rotations import Llama3Scaling, Rope, Temperature
from quire.models.specs.spec import Attention, Experts, GatedMLP, ModelSpec, RMSNorm
from quire.ops.reference.reference_ops import rotary
from tests.models.published import CONFIGS, rope_parameter
from tests.models.test_conformance import assert_same
from tests.models.tiny import CASES, SHAPE, PagedRun, random_tokens, reference_logits

SMALL = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
# Of Scout.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: Any) -> ModelSpec:
    return build(SMALL | changes)[0]


def test_what_configurations_leave_out() -> None:
    spec, theirs = read(), Llama4TextConfig()
    assert (spec.vocab_size, spec.width, spec.tied_head) == (theirs.vocab_size, theirs.hidden_size, False)
    assert spec.max_position == theirs.max_position_embeddings
    chunks = [layer.mixer.chunk for layer in spec.layers if isinstance(layer.mixer, Attention)]
    assert chunks == [8192 if kind == "chunked_attention" else None for kind in theirs.layer_types]
    rope = Rope(rope_parameter(theirs, "rope_theta"), interleaved=True)
    norm = RMSNorm(1e-5, learned=False)
    assert spec.layers[0].mixer == Attention(40, 8, 128, rope, qk_norm=norm, chunk=8192)
    temperature = Temperature(theirs.floor_scale, theirs.attn_scale)
    assert spec.layers[3].mixer == Attention(40, 8, 128, None, temperature=temperature)
    assert {layer.ffn for layer in spec.layers} == {
        Experts(16, 1, 8192, "sigmoid", scaled_input=True, shared_width=8192, transposed=True, parameters="columns")
    }


def test_as_released() -> None:
    """Every fourth layer sees all tokens, in Scout; every second one has experts, in Maverick."""
    text = CONFIGS["Llama 4 Scout"]["text_config"]
    spec = build({"architectures": ["Llama4ForConditionalGeneration"], "text_config": text | {"rope_scaling": LLAMA3}})[
        0
    ]
    mixers = [layer.mixer for layer in spec.layers]
    assert [idx for idx, mixer in enumerate(mixers) if mixer.chunk is None] == [*range(3, 48, 4)]
    assert mixers[0].rope == Rope(5e5, Llama3Scaling(16.0, 1.0, 1.0, 8192), interleaved=True)
    changes = {"interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False, "no_rope_layers": []}
    maverick = read(**changes)
    assert [idx for idx, layer in enumerate(maverick.layers) if isinstance(layer.ffn, Experts)] == [*range(1, 48, 2)]
    assert maverick.layers[0].ffn == GatedMLP(16384)
    assert {layer.mixer.qk_norm for layer in maverick.layers} == {None}


def test_layers_are_listed() -> None:
    spec = read(num_hidden_layers=4, no_rope_layers=[0, 1, 1, 0, 1], moe_layers=[])
    assert [layer.mixer.rope is not None for layer in spec.layers] == [False, True, True, False]
    assert [layer.mixer.chunk for layer in spec.layers] == [None, 8192, 8192, None]
    assert {layer.ffn for layer in spec.layers} == {GatedMLP(16384)}
    mixed = read(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"], no_rope_layers=[1, 0])
    assert [layer.mixer.chunk for layer in mixed.layers] == [None, 8192]
    assert [layer.mixer.rope is None for layer in mixed.layers] == [False, True]


@pytest.mark.parametrize("head_dim", [16, 24])
def test_neighbours_turn_as_in_transformers(head_dim: int) -> None:
    """In its order, a head turns by halves; put back, it is what transformers makes of it."""
    stated = LLAMA3 | {"rope_theta": 5000.0, "original_max_position_embeddings": 64}
    rope = read(head_dim=head_dim, rope_parameters=stated).layers[0].mixer.rope
    order = turning_order(rope, head_dim)
    assert order is not None
    generator = torch.Generator().manual_seed(0)
    heads, positions = torch.randn(9, 3, head_dim, generator=generator), torch.arange(0, 198, 22)
    rotation = RotaryEmbedding(rope, head_dim, torch.float32, torch.device("cpu"))(positions)
    found = torch.empty_like(heads)
    found[..., order] = rotary(heads[..., order], rotation)
    theirs = Llama4TextRotaryEmbedding(Llama4TextConfig(head_dim=head_dim, rope_parameters=dict(stated)))
    expected, _ = apply_rotary_emb(heads[None], heads[None], theirs(heads, positions[None]))
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=2e-5)


def test_queries_grow_where_contexts_are_long() -> None:
    scales = query_scales(Temperature(10.0, 0.5), torch.tensor([0, 8, 9, 18, 19, 99]))
    expected = 1.0 + 0.5 * torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 10.0]).log1p()
    assert scales.shape == (6, 1, 1)
    torch.testing.assert_close(scales.flatten(), expected)


def test_the_language_model_of_a_checkpoint_with_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers saves it, under the names of the released checkpoints; the rest of its tensors is left out."""
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    config = Llama4Config(text_config=SHAPE | CASES["llama4"][2] | {"initializer_range": 0.2}, vision_config=vision)
    torch.manual_seed(3)
    reference = Llama4ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    decoder = load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32)
    assert "vision_model" in caplog.text
    token_ids = random_tokens(45)
    run = PagedRun(decoder)
    found = torch.cat([run.step({0: part})[0] for part in (token_ids[:20], token_ids[20:44], token_ids[44:])])
    # The language model by itself: some releases of transformers fail in the whole model when a prompt has no image.
    assert_same(found, reference_logits(reference.language_model, token_ids))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("attention_chunk_size", {"attention_chunk_size": None}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("layer_types", {"layer_types": ["sliding_attention"] * 48}),
        ("rope_type", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        ("type", {"rope_scaling": {"type": "su"}}),
        ("tie_word_embeddings", {"architectures": ["Llama4ForConditionalGeneration"], "tie_word_embeddings": True}),
        ("quantization_config", {"quantization_config": {"quant_method": "compressed-tensors"}}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("no_rope_layers", {"no_rope_layers": [1, 0, 1]}),
        ("no_rope_layers", {"no_rope_layers": [2] * 48}),
        ("moe_layers", {"moe_layers": [-1]}),
        ("interleave_moe_layer_step", {"interleave_moe_layer_step": 0}),
        ("num_experts_per_tok", {"num_experts_per_tok": 17}),
        ("attention_chunk_size", {"attention_chunk_size": 0}),
        ("attn_temperature_tuning", {"attn_temperature_tuning": "yes"}),
    ],
)
def test_a_wrong_field_is_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        read(**changes)
    assert caught.value.field == field
