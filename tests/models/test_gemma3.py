"""Gemma 3: a checkpoint with a vision part, and roundings that differ from Llama's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding

from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import load_decoder
from quire.models.modules.decoder import Decoder
from quire.models.modules.norms import Norm
from quire.models.specs.spec import ModelSpec, RMSNorm
from quire.ops import make_ops
from quire.ops.reference.reference_ops import ReferenceOps
from tests.models.test_conformance import assert_same
from tests.models.tiny import SHAPE, PagedRun, random_tokens, reference_logits

CPU = torch.device("cpu")


def test_the_language_model_of_a_checkpoint_with_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers saves it, under the names of the released checkpoints; the rest is the encoder's, no surplus."""
    text = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 7}
    config = Gemma3Config(
        text_config=text | {"sliding_window": 9, "initializer_range": 0.2},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    torch.manual_seed(3)
    reference = Gemma3ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    decoder = load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32)
    assert not caplog.text
    token_ids = random_tokens(45)
    with torch.inference_mode():
        run = PagedRun(decoder)
        found = torch.cat([run.step({0: part})[0] for part in (token_ids[:30], token_ids[30:])])
    assert_same(found, reference_logits(reference, token_ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_norms_round_where_those_of_transformers_do(dtype: torch.dtype) -> None:
    theirs = Gemma3RMSNorm(64, eps=1e-6).to(dtype)
    ours = Norm(RMSNorm(1e-6, zero_centred=True), 64, ReferenceOps(), dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(64, generator=generator) / 8).to(dtype)
    x = torch.randn(500, 64, generator=generator).to(dtype)
    ours.slots["weight"].fill(weight)
    with torch.inference_mode():
        theirs.weight.copy_(weight)
        found, expected = ours(x), theirs(x)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:  # a last bit of float32 tips hardly any rounding
        assert (found != expected).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_embeddings_are_scaled_as_those_of_transformers(dtype: torch.dtype) -> None:
    """The scale is rounded first: in bfloat16 the square root of 3072 is 55.5."""
    spec = ModelSpec(20, 3072, (), RMSNorm(1e-6), True, 64, embedding_scale=3072**0.5)
    decoder = Decoder(spec, ops=make_ops(CPU), dtype=dtype, device=CPU)
    theirs = Gemma3TextScaledWordEmbedding(20, 3072, 0, embed_scale=3072**0.5).to(dtype)
    token_ids = torch.arange(20)
    with torch.inference_mode():
        decoder.weights.load("embedding.weight", theirs.weight.clone())
        assert torch.equal(decoder(token_ids, token_ids, (), ()), theirs(token_ids))
