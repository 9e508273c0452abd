"""Greedy tokens equal those of transformers under every history, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.memory import check
from tests.conformance.checkpoints import NEW_TOKENS
from tests.conformance.conftest import Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


def load(reference: Reference, **options: Any) -> LLM:
    """Load a family's checkpoint in float32 on one thread; a small pool unless told otherwise."""
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "max_model_len": 128,
        "block_size": 8,
        "num_kv_blocks": 200,
    }
    return LLM(str(reference.folder), **(defaults | options))


def outputs_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the first sample's tokens of each prompt, and see that nothing is left over."""
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    check(llm.engine.scheduler.memory)
    assert llm.usage().used == 0
    return outputs


def test_cold_for_each_batch_size(reference: Reference) -> None:
    for size in (1, 2, 3, 7):
        llm = load(reference, enable_prefix_caching=False)
        for start in range(0, 7, size):
            part = slice(start, start + size)
            assert outputs_of(llm, reference.prompts[part]) == reference.outputs[part]


def test_prefix_hits(reference: Reference) -> None:
    llm = load(reference)
    assert outputs_of(llm, reference.prompts) == reference.outputs
    again = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == reference.outputs
    # Every full block but the one that holds the last token comes from the cache.
    assert [output.num_cached_tokens for output in again] == [(len(p) - 1) // 8 * 8 for p in reference.prompts]


@pytest.mark.parametrize("budget", [2, 3, 7, 16, 61])
def test_chunked_prefill(reference: Reference, budget: int) -> None:
    llm = load(reference, max_num_seqs=2, max_num_batched_tokens=budget)
    assert outputs_of(llm, reference.prompts) == reference.outputs


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_preempted_and_recomputed(reference: Reference, caching: bool) -> None:
    llm = load(reference, num_kv_blocks=12, max_model_len=96, enable_prefix_caching=caching)
    assert outputs_of(llm, reference.prompts) == reference.outputs
    assert llm.stats.num_preemptions > 0


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_block_sizes(reference: Reference, block_size: int) -> None:
    llm = load(reference, block_size=block_size, num_kv_blocks=1000 // block_size)
    assert outputs_of(llm, reference.prompts) == reference.outputs


def test_forked(reference: Reference) -> None:
    llm = load(reference)
    forked = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, n=3)
    for output, expected in zip(
        llm.generate(reference.prompts, forked, use_tqdm=False), reference.outputs, strict=True
    ):
        assert [sample.token_ids for sample in output.outputs] == [expected] * 3
    assert llm.stats.num_copies > 0
    # Each prompt went through the model once, however many samples it has.
    assert llm.stats.computed_tokens < sum(map(len, reference.prompts)) + 3 * NEW_TOKENS * len(reference.prompts)


def test_sampled_tokens_do_not_depend_on_the_history(reference: Reference) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=NEW_TOKENS, n=2, repetition_penalty=1.2)

    def samples(llm: LLM, prompts: list[list[int]]) -> list[list[list[int]]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[sample.token_ids for sample in output.outputs] for output in outputs]

    alone = load(reference)
    expected = [samples(alone, [prompt])[0] for prompt in reference.prompts]
    assert any(first != second for first, second in expected)
    assert samples(alone, reference.prompts) == expected
    assert samples(load(reference, max_num_seqs=3, max_num_batched_tokens=5), reference.prompts) == expected
    scarce = load(reference, num_kv_blocks=12, max_model_len=96)
    assert samples(scarce, reference.prompts) == expected
    assert scarce.stats.num_preemptions > 0


def test_an_output_says_why_its_hit_ended(reference: Reference) -> None:
    llm = load(reference)
    prompt = max(reference.prompts, key=len)
    first, again = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, first.cache_hit_end) == (
        0,
        "a block that a longer hit needs is not in the prefix index",
    )
    assert (again.num_cached_tokens, again.cache_hit_end) == (
        (len(prompt) - 1) // 8 * 8,
        "at least one token must be computed",
    )
    (off,) = load(reference, enable_prefix_caching=False).generate([prompt], GREEDY, use_tqdm=False)
    assert (off.num_cached_tokens, off.cache_hit_end) == (0, "prefix caching is off")


@pytest.mark.parametrize("eviction_policy", ["fifo", "lfu", "slru"])
def test_every_eviction_policy(reference: Reference, eviction_policy: str) -> None:
    """A pool that evicts all the time, with repeated prompts: what is found again is what was computed."""
    llm = load(reference, eviction_policy=eviction_policy, num_kv_blocks=16, max_num_seqs=2)
    for _ in range(2):
        assert outputs_of(llm, reference.prompts) == reference.outputs
    assert llm.usage().num_evictions > 0


def test_restarted_from_disk(reference: Reference, tmp_path: Path) -> None:
    """What one engine computed, the next one finds on disk; where a byte of it was flipped, it computes again."""
    options = {"prefix_cache_dir": str(tmp_path / "cache"), "num_kv_blocks": 200}
    first = load(reference, **options)
    assert outputs_of(first, reference.prompts) == reference.outputs
    first.close()
    again = load(reference, **options, max_num_batched_tokens=16, max_num_seqs=2)
    outputs = again.generate(reference.prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == reference.outputs
    assert sum(output.num_disk_tokens for output in outputs) > 40
    # Every full block but the one that holds the last token comes from the cache, whichever tier it was on.
    assert [output.num_cached_tokens for output in outputs] == [(len(p) - 1) // 8 * 8 for p in reference.prompts]
    again.close()
    file = tmp_path / "cache" / "blocks.mdb"
    data = bytearray(file.read_bytes())
    for page in range(len(data) // 4096):
        data[page * 4096 + 3000] ^= 1
    file.write_bytes(data)
    damaged = load(reference, **options)
    assert outputs_of(damaged, reference.prompts) == reference.outputs
    assert damaged.stats.disk is not None
    assert damaged.stats.disk.num_damaged > 0
    damaged.close()
