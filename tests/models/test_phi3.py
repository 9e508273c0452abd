"""Phi-3: published configurations, the choice between LongRoPE's factors, and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire import LLM, SamplingParams
from quire.errors import CheckpointError, UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from quire.models.specs.frequencies import inverse_frequencies
from quire.models.specs.rotations import LongRopeScaling, Rope
from quire.models.specs.spec import ModelSpec
from tests.models.published import CONFIGS
from tests.models.test_conformance import assert_same
from tests.models.tiny import CASES, SHAPE, PagedRun, random_tokens, reference_logits

PHI3, PHI4 = CONFIGS["Phi-3.5 mini"], CONFIGS["Phi-4 mini"]
LONGROPE = PHI3["rope_scaling"]


def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return build(config | changes)[0]


def rope_of(spec: ModelSpec) -> Rope:
    attention = spec.layers[0].mixer
    assert attention.rope is not None
    return attention.rope


@pytest.mark.parametrize("config", [PHI3, PHI4])
@pytest.mark.parametrize("is_long", [True, False])
def test_frequencies_are_those_of_transformers(config: dict[str, Any], is_long: bool) -> None:
    factor = "long" if is_long else "short"
    scaling = dict(LONGROPE, **{f"{factor}_factor": torch.linspace(1, 60, 48).tolist()})
    rope = rope_of(read(config, rope_scaling=scaling).for_context(5000 if is_long else 4096))
    fields = {name: value for name, value in config.items() if name != "architectures"}
    theirs = Phi3Config(**fields | {"rope_scaling": dict(scaling)})
    expected, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=4096 + is_long)
    found, scale = inverse_frequencies(rope, rope.num_turned or 96)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert scale == pytest.approx(attention_factor, rel=1e-12)
    assert scale == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_published_configurations() -> None:
    mini, phi4 = read(PHI3), read(PHI4)
    assert rope_of(mini).num_turned is None
    assert rope_of(phi4).num_turned == 96
    assert phi4.tied_head
    assert phi4.layers[0].mixer.head_dim == 128
    # No context outgrows this window.
    assert mini.layers[0].mixer.window is None
    short = PHI3 | {"rope_scaling": None, "max_position_embeddings": 4096, "sliding_window": 2047}
    assert read(short).layers[0].mixer.window == 2047
    assert rope_of(read(short)) == Rope(10000.0)
    older = read(PHI3, rope_scaling=LONGROPE | {"type": "su"})
    assert older == mini


def test_the_longest_context_chooses_the_factors() -> None:
    """Of a sequence, each length would choose anew, and keys in the cache would be wrong."""
    spec = read(PHI3)

    def is_long(spec: ModelSpec) -> bool:
        scaling = rope_of(spec).scaling
        assert isinstance(scaling, LongRopeScaling)
        return scaling.is_long

    assert is_long(spec)
    assert spec.has_long_factors
    assert is_long(spec.for_context(4097))
    assert not is_long(spec.for_context(4096))
    assert not spec.for_context(4096).has_long_factors
    assert spec.for_context(4096).for_context(131072) == spec
    assert not is_long(read(PHI3, max_position_embeddings=4096))
    assert not read(PHI3, rope_scaling=None).has_long_factors


@pytest.mark.parametrize(("max_model_len", "length"), [(None, 45), (8, 8)])
def test_logits_for_a_context(max_model_len: int | None, length: int, tmp_path: Path) -> None:
    """Transformers takes the short factors up to 8 tokens, and we do so where there can be no more."""
    config_class, model_class, changes = CASES["phi3-longrope"]
    torch.manual_seed(5)
    reference = model_class(config_class(**SHAPE | changes | {"initializer_range": 0.2})).eval()
    reference.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(str(tmp_path))
    decoder = load_decoder(checkpoint, device="cpu", dtype=torch.float32, max_model_len=max_model_len)
    token_ids = random_tokens(length)
    expected = reference_logits(reference, token_ids)
    assert_same(PagedRun(decoder).step({0: token_ids})[0], expected)
    other = load_decoder(checkpoint, device="cpu", dtype=torch.float32, max_model_len=8 if max_model_len is None else 9)
    assert (PagedRun(other).step({0: token_ids})[0] - expected).abs().max() > 0.01


def test_blocks_on_disk_are_of_one_choice(tmp_path: Path) -> None:
    """An engine for long contexts does not read the keys that one for short contexts has stored."""
    config_class, model_class, changes = CASES["phi3-longrope"]
    torch.manual_seed(5)
    model_class(config_class(**SHAPE | changes)).save_pretrained(tmp_path / "model")
    prompt = random_tokens(7)
    hits = []
    for max_model_len in (8, 8, 64, 64):
        llm = LLM(
            str(tmp_path / "model"),
            skip_tokenizer_init=True,
            block_size=2,
            num_kv_blocks=40,
            max_model_len=max_model_len,
            prefix_cache_dir=str(tmp_path / "disk"),
        )
        try:
            params = SamplingParams(temperature=0.0, max_tokens=1)
            [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            hits.append(output.num_disk_tokens)
        finally:
            llm.close()
    assert hits == [0, 6, 0, 6]


@pytest.mark.parametrize(
    ("error", "field", "changes"),
    [
        (UnsupportedModel, "rope_type", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (UnsupportedModel, "type", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        (UnsupportedModel, "lm_head_bias", {"lm_head_bias": True}),
        (UnsupportedModel, "attention_bias", {"attention_bias": True}),
        (UnsupportedModel, "layer_types", {"layer_types": ["full_attention"] * 32}),
        (CheckpointError, "short_factor", {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48}}),
        (CheckpointError, "long_factor", {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 47}}),
        (CheckpointError, "long_factor", {"rope_scaling": LONGROPE | {"long_factor": [0.0] * 48}}),
        (CheckpointError, "partial_rotary_factor", {"partial_rotary_factor": 0.01}),
        (CheckpointError, "original_max_position_embeddings", {"original_max_position_embeddings": 1}),
    ],
)
def test_what_is_not_served_is_refused(error: type[Exception], field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=field) as caught:
        read(PHI3, **changes)
    assert getattr(caught.value, "field", None) == field
