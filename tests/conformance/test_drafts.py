"""Greedy tokens equal those of transformers with drafts that are verified, whatever happens to memory meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.sequences.sequence import Sequence
from tests.conformance.checkpoints import NEW_TOKENS
from tests.conformance.conftest import Reference
from tests.conformance.test_histories import GREEDY, load, outputs_of


class Oracle:
    """Knows how sequences go on, and is now and then mistaken.

    Args:
        texts: whole sequences, prompt and output.
        vocab_size: mistakes are in `[0, vocab_size)`.
    """

    def __init__(self, texts: list[list[int]], vocab_size: int) -> None:
        self.texts = texts
        self.vocab_size = vocab_size

    def propose(self, sequence: Sequence, limit: int) -> Tokens[int]:
        """Return some of the next tokens; what no text says goes on anyhow."""
        tokens = sequence.tokens
        rng = random.Random(repr((sequence.seq_id, len(tokens))))
        count = min(limit, rng.randrange(6))
        known = next((text[len(tokens) :] for text in self.texts if text[: len(tokens)] == tokens), [])
        draft = [*known, *([3] * count)][:count]
        return [token if rng.random() < 0.85 else rng.randrange(self.vocab_size) for token in draft]

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn nothing."""

    def forget(self, sequence: Sequence) -> None:
        """Know nothing of it."""

    def reset(self) -> None:
        """Know nothing."""


@pytest.fixture(scope="module")
def reference(core_reference: Reference) -> Reference:
    """Return a family's reference."""
    return core_reference


def with_oracle(reference: Reference, **options: Any) -> LLM:
    llm = load(reference, **options)
    texts = [prompt + output for prompt, output in zip(reference.prompts, reference.outputs, strict=True)]
    llm.engine.scheduler.drafts.drafter = Oracle(texts, llm.resolved.vocab_size)
    return llm


def saved_steps(llm: LLM) -> int:
    """Return the drafts that were right; see that some were wrong."""
    stats = llm.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    return stats.num_accepted_tokens


def test_cold_and_hit(reference: Reference) -> None:
    llm = with_oracle(reference)
    assert outputs_of(llm, reference.prompts) == reference.outputs
    assert saved_steps(llm) > 20
    again = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == reference.outputs
    assert sum(output.num_cached_tokens for output in again) > 0
    for prompt, output in zip(reference.prompts, reference.outputs, strict=True):
        llm.reset_prefix_cache()
        assert outputs_of(llm, [prompt]) == [output]


@pytest.mark.parametrize(
    "block_size", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(32, marks=pytest.mark.slow)]
)
def test_block_sizes(reference: Reference, block_size: int) -> None:
    llm = with_oracle(reference, block_size=block_size, num_kv_blocks=1000 // block_size)
    assert outputs_of(llm, reference.prompts) == reference.outputs
    assert saved_steps(llm) > 20


def test_chunked(reference: Reference) -> None:
    llm = with_oracle(reference, max_num_seqs=3, max_num_batched_tokens=7)
    assert outputs_of(llm, reference.prompts) == reference.outputs
    assert saved_steps(llm) > 0


@pytest.mark.parametrize(
    "options",
    [{}, {"swap_space": 8 << 20, "preemption_mode": "swap"}],
    ids=["recomputed", "swapped"],
)
def test_preempted(reference: Reference, options: dict[str, Any]) -> None:
    llm = with_oracle(reference, num_kv_blocks=12, max_model_len=96, **options)
    assert outputs_of(llm, reference.prompts * 3) == reference.outputs * 3
    assert llm.stats.num_preemptions > 0
    assert saved_steps(llm) > 0


def test_forked_and_sampled(reference: Reference) -> None:
    params = SamplingParams(
        temperature=1.0, top_p=0.9, seed=11, max_tokens=NEW_TOKENS, n=3, repetition_penalty=1.2, logprobs=1
    )

    def samples(llm: LLM) -> list[list[tuple[list[int], Any]]]:
        outputs = llm.generate(reference.prompts, params, use_tqdm=False)
        return [[(sample.token_ids, sample.finish_reason) for sample in output.outputs] for output in outputs]

    expected = samples(load(reference))
    llm = with_oracle(reference)
    texts = zip(reference.prompts, expected, strict=True)
    oracle = llm.engine.scheduler.drafter
    assert isinstance(oracle, Oracle)
    oracle.texts = [prompt + token_ids for prompt, output in texts for token_ids, _ in output]
    assert samples(llm) == expected
    assert saved_steps(llm) > 40


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_as_it_is_served(reference: Reference, method: str) -> None:
    llm = load(reference, speculative_method=method)
    llm.engine.step_recorder.speculation = None  # how fast this machine is does not matter
    for _ in range(3):
        assert outputs_of(llm, reference.prompts) == reference.outputs
    # Few of these outputs repeat themselves; all of them are repeated.
    if method == "suffix":
        assert llm.stats.num_accepted_tokens > 20
