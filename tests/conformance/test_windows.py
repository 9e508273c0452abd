"""Layers with a window or chunks hold that much in a running engine, and no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.memory.specs import ChunkedLocal, SlidingWindow
from tests.conformance.checkpoints import ragged_prompts, save_checkpoint

BLOCK_SIZE = 8
LOCAL = (SlidingWindow, ChunkedLocal)
MAX_TOKENS = 60


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "llama4", "mistral-window", "qwen2-window"])
@pytest.mark.parametrize("budget", [8, 64])
def test_what_is_out_of_sight_is_given_back_in_the_same_step(family: str, budget: int, tmp_path: Path) -> None:
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
    assert any(isinstance(group.spec, LOCAL) for group in groups)
    for count, group in zip(most, groups, strict=True):
        assert count <= group.spec.peak_blocks(num_tokens, budget)
        if isinstance(group.spec, LOCAL):
            assert count < -(-num_tokens // BLOCK_SIZE) / 2
        else:
            assert count == -(-num_tokens // BLOCK_SIZE)


@pytest.mark.parametrize(("family", "share"), [("gemma3", 0.5), ("llama4", 0.75)])
def test_the_smallest_pool_is_that_of_what_is_seen(family: str, share: float, tmp_path: Path) -> None:
    """The budget that the refusal names starts an engine, which serves the longest sequence; a byte less is refused."""
    folder = save_checkpoint(family, tmp_path)
    options = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "block_size": BLOCK_SIZE}
    options |= {"max_model_len": 400, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with pytest.raises(ConfigError) as refused:
        LLM(str(folder), **options, kv_cache_memory_bytes=100_000)
    words = re.search(r"set kv_cache_memory_bytes to at least (\d+)", str(refused.value))
    assert words is not None
    least = int(words[1])
    with pytest.raises(ConfigError):
        LLM(str(folder), **options, kv_cache_memory_bytes=least - 1)
    llm = LLM(str(folder), **options, kv_cache_memory_bytes=least)
    blocks = -(-400 // BLOCK_SIZE)
    assert least < blocks * llm.resolved.bytes_per_block * share
    prompt = [10 + idx % 180 for idx in range(340)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 60
    roomy = LLM(str(folder), **options, num_kv_blocks=200)
    assert roomy.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids
