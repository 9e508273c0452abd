"""Histories that take seconds a family: tokens equal those of transformers, or of the model under another history.

See conftest.py for which family runs when.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.memory import FullAttention, check
from tests.conformance.checkpoints import NEW_TOKENS
from tests.conformance.conftest import Reference
from tests.conformance.test_histories import FEW, GREEDY, has_states, load, longest_hit, outputs_of

PAIR = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, n=2, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(core_reference: Reference) -> Reference:
    """Return a family's reference."""
    return core_reference


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


@pytest.mark.parametrize("is_async", [False, True], ids=["step-by-step", "asynchronous"])
def test_restarted_from_disk(reference: Reference, is_async: bool, tmp_path: Path) -> None:
    """What one engine computed, the next one finds on disk; where a byte of it was flipped, it computes again."""
    options: dict[str, Any] = {"prefix_cache_dir": str(tmp_path / "cache"), "num_kv_blocks": 200}
    options |= {"swap_space": 16 << 20, "async_scheduling": is_async}
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
