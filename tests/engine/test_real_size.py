"""Generation with a vocabulary of 262,000 tokens: no request takes Python steps for each token of the vocabulary."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.operations import num_operations
from tests.real_size import BYTE_FALLBACK_SIZE

# Far below the vocabulary's size, and far above what three tokens of any request take (35,000; a bias of 1,024 tokens
# 124,000). In seconds of processor time, they take 0.01 to 0.04.
MAX_OPERATIONS = 200_000
MAX_S = 0.4
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 30.0, "top_p": 0.9},
    "typical_p": {"typical_p": 0.9},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 64},
    "logit_bias": {"logit_bias": dict.fromkeys(range(0, BYTE_FALLBACK_SIZE, 256), 1.0)},
    "allowed_token_ids": {"allowed_token_ids": list(range(BYTE_FALLBACK_SIZE))},
    "min_tokens": {"min_tokens": 2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "dry": {"dry_multiplier": 0.8},
    "bad_words": {"bad_words": [f"word{idx}" for idx in range(50)]},
    "stop": {"stop": ["one", "another"]},
    "logprobs": {"logprobs": 20},
    "prompt_logprobs": {"prompt_logprobs": 20},
    "samples": {"n": 3, "best_of": 4},
    "beams": {"beam_width": 4, "temperature": 0.0},
}


@pytest.fixture(scope="module")
def llm(byte_fallback_folder: Path) -> Iterator[LLM]:
    """Return a model with the vocabulary."""
    with LLM(byte_fallback_folder, num_threads=1, max_num_seqs=8, max_model_len=256, num_kv_blocks=64) as llm:
        assert llm.resolved.vocab_size == BYTE_FALLBACK_SIZE
        yield llm


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_takes_no_step_for_each_token_of_the_vocabulary(llm: LLM, kind: str) -> None:
    params = {"max_tokens": 3, "ignore_eos": "min_tokens" not in KINDS[kind]} | KINDS[kind]
    start_s = time.process_time()
    assert num_operations(lambda: llm.generate([[5, 6, 7, 8]], SamplingParams(**params))) < MAX_OPERATIONS
    assert time.process_time() - start_s < MAX_S
