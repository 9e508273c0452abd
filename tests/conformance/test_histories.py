"""Greedy tokens equal those of transformers under every history; see conftest.py for which family runs when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.memory import TokenSources, check
from tests.conformance.checkpoints import NEW_TOKENS
from tests.conformance.conftest import Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
# Of what many hits are continued with, enough to leave the block in which they end.
FEW = 9


def load(reference: Reference, **options: Any) -> LLM:
    """Load a family's checkpoint in float32 on one thread; a small pool unless told otherwise.

    Args:
        options: `num_kv_blocks` is for a model of attention alone; states get room besides.
    """
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "max_model_len": 128,
        "block_size": 8,
        "num_kv_blocks": 200,
    }
    options = defaults | options
    options["num_kv_blocks"] *= reference.pool_factor
    return LLM(str(reference.folder), **options)


def has_states(llm: LLM) -> bool:
    """Tell whether layers keep states: then a hit ends where a whole block does, at a snapshot."""
    return any(group.spec.is_recurrent for group in llm.engine.scheduler.memory.groups)


def longest_hit(llm: LLM, num_tokens: int) -> int:
    """Return the longest hit that the kinds of cache allow: whole blocks where layers keep states."""
    return num_tokens // 8 * 8 if has_states(llm) else num_tokens


def outputs_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the first sample's tokens of each prompt, and see that nothing is left over."""
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    check(llm.engine.scheduler.memory)
    assert llm.usage().used == 0
    return outputs


def test_cold_for_each_batch_size(reference: Reference) -> None:
    llm = load(reference, enable_prefix_caching=False)
    for size in (1, 3, 7):
        for start in range(0, 7, size):
            part = slice(start, start + size)
            assert outputs_of(llm, reference.prompts[part]) == reference.outputs[part]


def test_prefix_hits(reference: Reference) -> None:
    llm = load(reference)
    assert outputs_of(llm, reference.prompts) == reference.outputs
    again = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == reference.outputs
    # All but the last token comes from the cache: whole blocks, and the beginning of the one that it is in.
    expected = [longest_hit(llm, len(prompt) - 1) for prompt in reference.prompts]
    assert [output.num_cached_tokens for output in again] == expected


@pytest.mark.parametrize("block_size", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_partial_hits(reference: Reference, block_size: int) -> None:
    """Each prompt after one that parts from it inside a block: what is copied of that block is what was computed."""
    llm = load(reference, block_size=block_size, num_kv_blocks=1000 // block_size)
    for prompt, expected in zip(reference.prompts, reference.outputs, strict=True):
        for num_common in sorted({1, len(prompt) // 2, len(prompt) - 1} & {*range(1, len(prompt))}):
            other = prompt[:num_common] + [prompt[num_common] ^ 1] * block_size
            llm.reset_prefix_cache()
            llm.generate([other], replace(GREEDY, max_tokens=1), use_tqdm=False)
            (output,) = llm.generate([prompt], replace(GREEDY, max_tokens=FEW), use_tqdm=False)
            assert output.outputs[0].token_ids == expected[:FEW]
            # The snapshot before the end of the other prompt is of no use, unless it is where the two part.
            is_of_use = not has_states(llm) or num_common % block_size == 0
            assert (output.num_cached_tokens or 0) >= (num_common if is_of_use else 0)
            assert output.prompt_account is not None
            assert output.prompt_account.sources.copied == output.num_cached_tokens % block_size
    check(llm.engine.scheduler.memory)


@pytest.mark.parametrize("budget", [3, 16, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (2, 7, 61))])
def test_chunked_prefill(reference: Reference, budget: int) -> None:
    llm = load(reference, max_num_seqs=2, max_num_batched_tokens=budget)
    assert outputs_of(llm, reference.prompts) == reference.outputs


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_preempted_and_recomputed(reference: Reference, caching: bool) -> None:
    llm = load(reference, num_kv_blocks=12, max_model_len=96, enable_prefix_caching=caching)
    assert outputs_of(llm, reference.prompts) == reference.outputs
    assert llm.stats.num_preemptions > 0


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_swapped_out_and_in(reference: Reference, caching: bool) -> None:
    llm = load(
        reference,
        num_kv_blocks=12,
        max_model_len=96,
        enable_prefix_caching=caching,
        swap_space=8 << 20,
        preemption_mode="swap",
    )
    assert outputs_of(llm, reference.prompts) == reference.outputs
    assert llm.stats.num_swaps == llm.stats.num_preemptions > 0
    assert llm.stats.wasted_tokens == 0
    host = llm.usage().host
    assert host is not None
    assert (host.used, host.num_sequences) == (0, 0)
    assert min(host.num_swap_outs, host.num_swap_ins) > 0


@pytest.mark.parametrize(
    "block_size", [1, pytest.param(4, marks=pytest.mark.slow), 16, pytest.param(32, marks=pytest.mark.slow)]
)
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


def test_an_output_says_why_its_hit_ended(reference: Reference) -> None:
    llm = load(reference)
    prompt = max(reference.prompts, key=len)
    first, again = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, first.cache_hit_end) == (
        0,
        "no cached prefix continues with the next tokens",
    )
    assert (again.num_cached_tokens, again.cache_hit_end) == (
        longest_hit(llm, len(prompt) - 1),
        "at least one token must be computed",
    )
    whole = (len(prompt) - 1) // 8 * 8
    for output, cached in ((first, 0), (again, longest_hit(llm, len(prompt) - 1))):
        account = output.prompt_account
        assert account is not None
        assert account.sources == TokenSources(
            device=min(cached, whole), copied=cached - min(cached, whole), computed=len(prompt) - cached
        )
        assert sum(account.reasons) == len(prompt) - cached
    parting = [*prompt[:13], prompt[13] ^ 1, *prompt[14:]]
    (other,) = llm.generate([parting], GREEDY, use_tqdm=False)
    assert (other.num_cached_tokens, other.cache_hit_end, other.cache_differs_at) == (
        (0, "a cache group lacks a block or a snapshot that a longer hit needs", None)
        if has_states(llm)
        else (13, "no cached prefix continues with the next tokens", 13)
    )
    (off,) = load(reference, enable_prefix_caching=False).generate([prompt], GREEDY, use_tqdm=False)
    assert (off.num_cached_tokens, off.cache_hit_end) == (
        0,
        "prefix caching is off, or the request limits how much is reused",
    )
