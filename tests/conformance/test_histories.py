"""Greedy tokens equal those of transformers under every history; see conftest.py for which family runs when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.memory import FullAttention, TokenSources, check
from tests.conformance.checkpoints import NEW_TOKENS
from tests.conformance.conftest import Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
# Of what many hits are continued with, enough to leave the block in which they end.
FEW = 9
PAIR = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, n=2, ignore_eos=True)


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


def test_the_next_turn_of_a_chat_recomputes_nothing(reference: Reference) -> None:
    """A prompt that goes on where an answer ended: only what was never computed is."""
    llm = load(reference)
    for prompt, expected in zip(reference.prompts, reference.outputs, strict=True):
        for num_first in {1, 3, 6} & {*range(len(expected) - 1)}:
            llm.reset_prefix_cache()
            first = SamplingParams(temperature=0.0, max_tokens=num_first)
            assert outputs_of(llm, [prompt], first) == [expected[:num_first]]
            rest = SamplingParams(temperature=0.0, max_tokens=FEW)
            turn = prompt + expected[: num_first + 1]
            (output,) = llm.generate([turn], rest, use_tqdm=False)
            assert output.outputs[0].token_ids == expected[num_first + 1 :][:FEW]
            # The last token of the answer was sampled, but never went through the model. Of states, the last
            # snapshot is that of the prompt.
            num_computed = len(prompt) - 1 if has_states(llm) else len(prompt) + num_first - 1
            assert output.num_cached_tokens == longest_hit(llm, num_computed)
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


@pytest.mark.parametrize("policy", [pytest.param("last", marks=pytest.mark.slow), "least_waste"])
def test_families_swapped_out_and_in_still_share(reference: Reference, policy: str) -> None:
    """Samples that come back from the host hold their prompt's blocks together, as before (M8)."""
    options: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 6, "enable_prefix_caching": False}
    roomy = load(reference, **options)
    options |= {"swap_space": 8 << 20, "preemption_mode": "swap", "preemption_policy": policy}
    # States are counted in what the longest sequence takes.
    num_blocks = -(-roomy.resolved.longest_blocks // reference.pool_factor)
    llm = load(reference, **options, num_kv_blocks=max(8, num_blocks))
    specs = [group.spec for group in llm.engine.scheduler.memory.groups]
    full_idx = next((idx for idx, spec in enumerate(specs) if isinstance(spec, FullAttention)), None)
    shared: list[int] = []
    # Who grows first differs: it takes whole families, or one sample from another of its own. What copies and prompts
    # were measured to take decides too, so more lengths are tried where no family went.
    for idx, length in enumerate((20, 29, 35, 23, 32, 26, 38)):
        if idx >= 3 and shared:
            break
        prompt = max(reference.prompts, key=len)[:length]
        alone = [output.outputs for output in roomy.generate([prompt[:-1], prompt], PAIR, use_tqdm=False)]
        expected = [[sample.token_ids for sample in samples] for samples in alone]
        assert serve_pairs(llm, [prompt[:-1], prompt, prompt], shared, full_idx or 0) == [*expected, expected[1]]
    assert shared, "no family was swapped"
    # The prompt leaves a window: where every layer has one, samples share nothing for long.
    assert full_idx is None or min(shared) > 0, "samples came back with copies of their prompt"


def serve_pairs(llm: LLM, prompts: list[list[int]], shared: list[int], group_idx: int) -> list[list[list[int]]]:
    """Return the tokens of two samples of each prompt; add the blocks that pairs share when they come back."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, PAIR)
    tokens: list[list[list[int]]] = [[[], []] for _ in prompts]
    was_swapped: set[int] = set()
    while engine.has_unfinished:
        for output in engine.step():
            for sample in output.outputs:
                tokens[int(output.request_id)][sample.index] += sample.token_ids
        check(scheduler.memory)
        back = was_swapped & {sequence.seq_id for sequence in scheduler.running}
        was_swapped = {sequence.seq_id for sequence in scheduler.swapped}
        for request in scheduler.requests.values():
            family = [sequence.seq_id for sequence in request.sequences if sequence.seq_id in back]
            if len(family) == 2:
                first, second = (scheduler.memory.block_table(seq_id, group_idx) for seq_id in family)
                shared.append(sum(a == b != 0 for a, b in zip(first, second, strict=False)))
    return tokens


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


@pytest.mark.parametrize(
    "eviction_policy",
    [pytest.param("fifo", marks=pytest.mark.slow), pytest.param("lfu", marks=pytest.mark.slow), "slru"],
)
def test_every_eviction_policy(reference: Reference, eviction_policy: str) -> None:
    """A pool that evicts all the time, with repeated prompts: what is found again is what was computed."""
    llm = load(reference, eviction_policy=eviction_policy, num_kv_blocks=16, max_num_seqs=2)
    for _ in range(2):
        assert outputs_of(llm, reference.prompts) == reference.outputs
    assert llm.usage().num_evictions > 0


def test_restarted_from_disk(reference: Reference, tmp_path: Path) -> None:
    """What one engine computed, the next one finds on disk; where a byte of it was flipped, it computes again."""
    options = {"prefix_cache_dir": str(tmp_path / "cache"), "num_kv_blocks": 200, "swap_space": 16 << 20}
    first = load(reference, **options)
    assert outputs_of(first, reference.prompts) == reference.outputs
    first.close()
    again = load(reference, **options, max_num_batched_tokens=16, max_num_seqs=2)
    outputs = again.generate(reference.prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == reference.outputs
    assert sum(output.num_disk_tokens for output in outputs) > 40
    # Every full block but the one that holds the last token comes from the cache, whichever tier it was on.
    accounts = [output.prompt_account for output in outputs]
    found = [sum(account.sources[:3]) for account in accounts if account is not None]
    assert found == [(len(p) - 1) // 8 * 8 for p in reference.prompts]
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
