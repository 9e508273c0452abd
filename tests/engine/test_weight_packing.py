"""Weights packed to three quarters of their bytes, on the bundled model: nothing else changes."""

from __future__ import annotations

import logging

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests.ops.backends import LIBRARIES

PROMPTS = ["Once upon a time, a small fox", "Tom found a red kite", "The old sailor " * 20]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=1)


def load(weight_packing: str, **options: str) -> LLM:
    """Load the bundled model with a small pool on one thread."""
    return LLM("bundled", num_kv_blocks=128, num_threads=1, max_model_len=512, weight_packing=weight_packing, **options)


@pytest.mark.skipif(not set(LIBRARIES) - {"portable"}, reason="the kernels of this CPU do not pack so")
def test_tokens_and_log_probabilities_are_the_same_bit_for_bit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        packed = load("lossless").generate(PROMPTS, PARAMS, use_tqdm=False)
    assert "weights packed lossless to 7" in caplog.text
    plain = load("plain").generate(PROMPTS, PARAMS, use_tqdm=False)
    for found, expected in zip(packed, plain, strict=True):
        assert found.prompt_logprobs == expected.prompt_logprobs
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.parametrize(("name", "value"), [("dtype", "float32"), ("kernels", "torch")])
def test_it_is_refused_where_it_cannot_be_had(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"weight_packing 'lossless'.*use 'plain'") as caught:
        load("lossless", **{name: value})
    assert caught.value.field == "weight_packing"
