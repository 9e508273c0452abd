"""GPT-2: published configurations, checkpoints as published and as transformers saves them, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2ForTokenClassification

from quire import LLM
from quire.cli.quantization.quantize import QuantizeOptions, quantize
from quire.errors import UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.parameter_estimate import estimate_parameters
from quire.models.specs.spec import Attention, ModelSpec, PlainMLP
from tests.models.test_conformance import assert_same
from tests.models.tiny import CASES, SHAPE, PagedRun, random_tokens, reference_logits

# The smallest one as published; what it states of dropout and of summaries is left out.
PUBLISHED: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def read(**changes: Any) -> ModelSpec:
    return build(PUBLISHED | changes)[0]


def save_tiny(folder: Path, **fields: Any) -> Any:
    """Save a random model, and return it."""
    config_class, model_class, options = CASES["gpt2"]
    torch.manual_seed(3)
    model: Any = model_class(config_class(**SHAPE | options | fields)).eval()
    model.save_pretrained(folder)
    return model


def test_as_published() -> None:
    spec = read()
    (layer,) = set(spec.layers)
    attention = Attention(12, 12, 64, None, qkv_bias=True, output_bias=True, score_scale=0.125)
    assert (layer.norm, layer.mixer) == (LayerNorm(1e-5), attention)
    assert layer.ffn == PlainMLP(3072, "gelu_tanh", bias=True)
    assert (spec.num_positions, spec.max_position, spec.tied_head) == (1024, 1024, True)
    # 124 million with biases and norms.
    assert estimate_parameters(spec).total == pytest.approx(124e6, rel=0.01)


def test_scores_are_scaled_by_layer() -> None:
    scales = [layer.mixer.score_scale for layer in read(scale_attn_by_inverse_layer_idx=True).layers]
    assert scales == [0.125 / number for number in range(1, 13)]
    (layer,) = set(read(scale_attn_weights=False).layers)
    assert layer.mixer.score_scale == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_checkpoint_as_published(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its names have no prefix, its configuration says nothing of a tied head, and it has causal masks."""
    model = save_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {name.removeprefix("transformer."): values.to(dtype) for name, values in tensors.items()}
    named["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(named, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name != "tie_word_embeddings"})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    decoder = load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32)
    tokens = random_tokens(30)
    assert_same(PagedRun(decoder).step({0: tokens})[0], reference_logits(model, tokens))


def test_a_head_over_each_token(tmp_path: Path) -> None:
    """Its name is that of encoders' heads."""
    torch.manual_seed(4)
    config = GPT2Config(**SHAPE | {"num_attention_heads": 4, "num_labels": 3})
    model = GPT2ForTokenClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokens = random_tokens(12)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", num_threads=1) as llm:
        (output,) = llm.classify_tokens([tokens], use_activation=False, use_tqdm=False)
    torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, rtol=2e-4, atol=2e-4)


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="activation_function is 'mish', but only 'gelu'"):
        read(activation_function="mish")


def test_cross_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="add_cross_attention"):
        read(add_cross_attention=True)


def test_quantised_copies_are_refused(tmp_path: Path) -> None:
    """They would have matrices of both orders."""
    save_tiny(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="'GPT2LMHeadModel' has matrices that are stored by columns"):
        quantize(str(tmp_path / "model"), tmp_path / "out", QuantizeOptions(to="int8"))
