"""An engine on rounded weights."""

from __future__ import annotations

import logging

import pytest

from quire import LLM, SamplingParams
from quire.config import Quantization

# Their next words are no near ties, as those of "Once upon a time" are.
PROMPTS = ["Once upon a time, a small fox", "Tom", "The old sailor had a boat, and every day he"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def texts(quantization: Quantization | None) -> list[str]:
    llm = LLM(quantization=quantization, num_kv_blocks=128, max_model_len=256)
    try:
        assert llm.resolved.quantization == quantization
        return [each.outputs[0].text for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    finally:
        llm.close()


def test_the_bundled_model(caplog: pytest.LogCaptureFixture) -> None:
    """What is written alike at first may part later; it stays words of a story."""
    plain = texts(None)
    least_alike: dict[Quantization, int] = {"int8": 2, "int4": 1}
    for quantization, num_alike in least_alike.items():
        with caplog.at_level(logging.INFO):
            found = texts(quantization)
        assert f"weights: {quantization}" in caplog.text
        assert sum(ours[:16] == theirs[:16] for ours, theirs in zip(found, plain, strict=True)) >= num_alike
        assert all(text.isascii() and len(text.split()) >= 8 for text in found)
