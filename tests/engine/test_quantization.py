"""An engine on rounded weights."""

from __future__ import annotations

import logging
import statistics
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import Quantization

PROMPTS = ["Once upon a time, a small fox", "Tom", "The old sailor had a boat, and every day he"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
# A text of the model's own kind, to compare probabilities on: which of two words that are about as likely comes first
# is a matter of chance, and greedy texts part there.
STORY = (
    "Once upon a time, a small fox lived alone in a little house. He liked to look at the stars. Tom was playing in "
    "the forest with a young girl named Martha. They had a pink bag, but only one of them could use it. The old sailor "
    "had a boat, and every day he went out to sea."
)


def logprobs(llm: LLM) -> list[float]:
    """Return the log probability of each token of the story after the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate(STORY, params, use_tqdm=False)[0].prompt_logprobs
    assert found is not None
    return [next(iter(each.values())).logprob for each in found if each]


def test_the_bundled_model(caplog: pytest.LogCaptureFixture) -> None:
    """Log probabilities are near the plain model's (by 0.02 and 0.15), and answers are words of a story."""
    options: dict[str, Any] = {"num_kv_blocks": 128, "max_model_len": 256}
    with LLM(**options) as plain:
        expected = logprobs(plain)
    furthest: dict[Quantization, float] = {"int8": 0.04, "int4": 0.3}
    for quantization, limit in furthest.items():
        with caplog.at_level(logging.INFO), LLM(quantization=quantization, **options) as llm:
            assert llm.resolved.quantization == quantization
            found = logprobs(llm)
            answers = [each.outputs[0].text for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert f"weights: {quantization}" in caplog.text
        distance = statistics.fmean(abs(ours - plain) for ours, plain in zip(found, expected, strict=True))
        assert limit / 10 < distance < limit
        assert all(text.isascii() and len(text.split()) >= 8 for text in answers)
