"""Layers with a window hold their window in a running engine, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.memory.specs import SlidingWindow
from tests.conformance.checkpoints import ragged_prompts, save_checkpoint

BLOCK_SIZE = 8
MAX_TOKENS = 60


@pytest.mark.parametrize("family", ["gemma3", "mistral-window", "qwen2-window"])
@pytest.mark.parametrize("budget", [8, 64])
def test_what_left_the_window_is_given_back_in_the_same_step(family: str, budget: int, tmp_path: Path) -> None:
    llm = LLM(
        str(save_checkpoint(family, tmp_path)),
        skip_tokenizer_init=True,
        dtype="float32",
        num_threads=1,
        block_size=BLOCK_SIZE,
        max_model_len=200,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        num_kv_blocks=200,
    )
    engine, groups = llm.engine, llm.engine.scheduler.memory.groups
    prompt = max(ragged_prompts(), key=len)
    engine.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
    most = [0] * len(groups)
    while engine.has_unfinished:
        engine.step()
        most = [max(count, group.used) for count, group in zip(most, engine.usage().groups, strict=True)]
    num_tokens = len(prompt) + MAX_TOKENS - 1
    assert any(isinstance(group.spec, SlidingWindow) for group in groups)
    for count, group in zip(most, groups, strict=True):
        assert count <= group.spec.peak_blocks(num_tokens, budget)
        if isinstance(group.spec, SlidingWindow):
            assert count < -(-num_tokens // BLOCK_SIZE) / 2
        else:
            assert count == -(-num_tokens // BLOCK_SIZE)
