"""Qwen3.5: configurations, partial rotation of heads, and a checkpoint with a vision part."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from quire.models.modules.blocks import turning_order
from quire.models.modules.rope import RotaryEmbedding
from quire.models.specs.rotations import Rope, YarnScaling
from quire.models.specs.spec import Attention, GatedDeltaNet, ModelSpec, RMSNorm
from quire.ops.pytorch.torch_states import CHUNK_ROWS
from quire.ops.reference.reference_ops import rotary
from tests.models.published import CONFIGS, rope_parameter
from tests.models.test_conformance import assert_same
from tests.models.tiny import CASES, SHAPE, PagedRun, random_tokens, reference_logits

SMALL = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True}


def read(**changes: Any) -> ModelSpec:
    return build(SMALL | changes)[0]


def test_what_configurations_leave_out() -> None:
    spec, theirs = read(), Qwen3_5TextConfig()
    assert (spec.vocab_size, spec.width, spec.tied_head) == (theirs.vocab_size, theirs.hidden_size, False)
    assert spec.max_position == theirs.max_position_embeddings
    kinds = ["full_attention" if isinstance(layer.mixer, Attention) else "linear_attention" for layer in spec.layers]
    assert kinds == theirs.layer_types
    norm, num_turned = RMSNorm(1e-6, zero_centred=True), int(256 * rope_parameter(theirs, "partial_rotary_factor"))
    assert spec.layers[3].mixer == Attention(
        16, 4, 256, Rope(rope_parameter(theirs, "rope_theta"), None, num_turned), qk_norm=norm, output_gate=True
    )
    assert spec.layers[0].mixer == GatedDeltaNet(16, 32, 128, 128, 4, RMSNorm(1e-6))
    assert {layer.ffn.width for layer in spec.layers} == {theirs.intermediate_size}


def test_as_released() -> None:
    """The 0.8B model; whether the head is tied is stated for the whole checkpoint."""
    config = CONFIGS["Qwen3.5 of 24 layers"]
    spec = build(config)[0]
    assert [idx for idx, layer in enumerate(spec.layers) if isinstance(layer.mixer, Attention)] == [*range(3, 24, 4)]
    assert (spec.tied_head, build(config | {"tie_word_embeddings": False})[0].tied_head) == (True, False)


def test_rotations() -> None:
    rope = read(rope_parameters=PLAIN | {"partial_rotary_factor": 0.5}).layers[3].mixer.rope
    assert rope == Rope(1e7, None, 128)
    assert read(rope_theta=1e7, partial_rotary_factor=0.5).layers[3].mixer.rope == rope
    spec = read(rope_parameters=YARN, partial_rotary_factor=0.5, max_position_embeddings=64)
    assert isinstance(spec.layers[3].mixer.rope.scaling, YarnScaling)
    assert (spec.layers[3].mixer.rope.num_turned, spec.max_position) == (128, 256)


@pytest.mark.parametrize("parameters", [PLAIN, YARN], ids=lambda parameters: str(parameters["rope_type"]))
@pytest.mark.parametrize(("head_dim", "fraction"), [(32, 0.25), (24, 0.5), (20, 0.4), (16, 1.0)])
def test_a_part_of_each_head_turns_as_in_transformers(parameters: Any, head_dim: int, fraction: float) -> None:
    """In its order, a head turns as a whole; put back, it is what transformers makes of it."""
    stated = parameters | {"partial_rotary_factor": fraction, "mrope_section": [1, 1, 1]}
    rope = read(head_dim=head_dim, rope_parameters=stated, max_position_embeddings=64).layers[3].mixer.rope
    order = turning_order(rope, head_dim)
    assert order is not None
    assert sorted(order.tolist()) == [*range(head_dim)]
    generator = torch.Generator().manual_seed(0)
    heads, positions = torch.randn(9, 3, head_dim, generator=generator), torch.arange(0, 198, 22)
    rotation = RotaryEmbedding(rope, head_dim, torch.float32, torch.device("cpu"))(positions)
    found = torch.empty_like(heads)
    found[..., order] = rotary(heads[..., order], rotation)
    theirs = Qwen3_5TextRotaryEmbedding(
        Qwen3_5TextConfig(head_dim=head_dim, rope_parameters=dict(stated), max_position_embeddings=64)
    )
    cos, sin = theirs(heads, positions[None, None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=2e-5)


def test_the_language_model_of_a_checkpoint_with_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers saves it, under the names of the released checkpoints; the rest of its tensors is left out."""
    config = Qwen3_5Config(
        text_config=SHAPE | CASES["qwen3.5"][2] | {"initializer_range": 0.2},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    reference = Qwen3_5ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    decoder = load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32)
    # Its encoder is no part of the decoder, and of the model all the same.
    assert "visual" not in caplog.text
    token_ids = random_tokens(2 * CHUNK_ROWS + 20)
    cuts = (0, CHUNK_ROWS + 9, len(token_ids) - 1, len(token_ids))
    with torch.inference_mode():
        run = PagedRun(decoder)
        found = torch.cat([run.step({0: token_ids[start:end]})[0] for start, end in pairwise(cuts)])
    # Weights this wide are sensitive: without fused multiply-add, transformers' own logits differ by 35 millionths from
    # those in float64 at one place, and ours by 23 at another.
    assert_same(found, reference_logits(reference, token_ids), factor=60.0)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_experts", {"num_experts": 64}),
        ("hidden_act", {"hidden_act": "gelu_pytorch_tanh"}),
        ("attn_output_gate", {"attn_output_gate": False}),
        ("mamba_ssm_dtype", {"mamba_ssm_dtype": "bfloat16"}),
        ("layer_types", {"layer_types": ["linear_attention", "sliding_attention"] * 16}),
        ("rope_type", {"rope_parameters": {"rope_type": "proportional"}}),
        ("type", {"rope_scaling": {"type": "su"}}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("linear_num_value_heads", {"linear_num_value_heads": 24}),
        ("linear_conv_kernel_dim", {"linear_conv_kernel_dim": 1}),
        ("partial_rotary_factor", {"partial_rotary_factor": 1.5}),
        ("partial_rotary_factor", {"rope_parameters": {"partial_rotary_factor": 0.012}}),
        ("full_attention_interval", {"full_attention_interval": 0}),
        ("tie_word_embeddings", {"architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": 1}),
        ("text_config", {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": []}),
    ],
)
def test_a_wrong_field_is_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        read(**changes)
    assert caught.value.field == field
