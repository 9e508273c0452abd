"""Tokens equal those of transformers with alternative drafts, which are verified as forks of their sequences."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.async_engine import AsyncEngine
from quire.memory import check
from quire.scheduling.draft_branches import DraftBranches
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.sequence import Sequence
from tests.conformance.checkpoints import NEW_TOKENS
from tests.conformance.conftest import Reference
from tests.conformance.test_draft_model import noisy_copy
from tests.conformance.test_drafts import Oracle
from tests.conformance.test_histories import load, outputs_of
from tests.conformance.test_mtp import noisy_model

NUM_BRANCHES = 3


class BranchingOracle(Oracle):
    """Knows how sequences go on, and has it in one of several drafts."""

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """See `Oracle`; the first token is wrong half of the time."""
        draft = list(super().propose(sequence, limit))
        rng = random.Random(repr((sequence.seq_id, sequence.tokens)))
        return [rng.randrange(self.vocab_size), *draft[1:]] if draft and rng.random() < 0.5 else draft

    def propose_branches(self, sequence: Sequence, draft: list[int], limit: int, count: int) -> list[list[int]]:
        """Return drafts that begin with other tokens; most times, one of them with the one that comes next."""
        rng, tokens = random.Random(repr((sequence.seq_id, sequence.tokens, count))), sequence.tokens
        known = next((text[len(tokens) :] for text in self.texts if text[: len(tokens)] == tokens), [])
        others = [[token, *[3] * (limit - 1)] for token in rng.sample(range(self.vocab_size), count)]
        if rng.random() < 0.8:
            others[rng.randrange(count)] = known[:limit]
        return [other for other in others if other and other[0] != draft[0]]


@pytest.fixture(scope="module")
def reference(core_reference: Reference) -> Reference:
    """Return a family's reference."""
    return core_reference


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry each time that a sequence goes on with a branch."""
    seen: list[int] = []
    take_over = DraftBranches.take_over

    def take_over_seen(self: DraftBranches, sequence: Sequence) -> None:
        take_over(self, sequence)
        seen.append(sequence.seq_id)

    monkeypatch.setattr(DraftBranches, "take_over", take_over_seen)
    return seen


def with_free_drafts(llm: LLM) -> LLM:
    """Let drafts cost nothing, so that all are used."""
    llm.engine.step_recorder.speculation = None
    drafter = llm.engine.scheduler.drafter
    assert isinstance(drafter, AdaptiveDrafter)
    assert drafter.num_branches == NUM_BRANCHES
    drafter.step_costs = [1.0] * len(drafter.step_costs)
    return llm


def with_oracle(reference: Reference, texts: list[list[int]] | None = None, **options: Any) -> LLM:
    """Load a model with drafts from texts, prompt and output; by default those of its greedy outputs."""
    llm = load(reference, **options)
    if texts is None:
        texts = [prompt + output for prompt, output in zip(reference.prompts, reference.outputs, strict=True)]
    oracle = BranchingOracle(texts, llm.resolved.vocab_size)
    llm.engine.scheduler.drafts.drafter = AdaptiveDrafter(oracle, 5, NUM_BRANCHES)
    return with_free_drafts(llm)


def with_model(reference: Reference, draft: Path, **options: Any) -> LLM:
    options.setdefault("num_kv_blocks", 200)
    method: dict[str, Any] = {"speculative_method": "draft", "draft_model": str(draft), "num_speculative_tokens": 3}
    return with_free_drafts(load(reference, num_speculative_branches=NUM_BRANCHES, **method, **options))


def test_a_branch_goes_on_where_the_draft_is_wrong(reference: Reference, choices: list[int]) -> None:
    llm = with_oracle(reference)
    assert outputs_of(llm, reference.prompts) == reference.outputs
    assert outputs_of(llm, reference.prompts * 2) == reference.outputs * 2
    assert len(choices) > 5
    assert llm.stats.prefix_hits > 0
    check(llm.engine.scheduler.memory)
    assert llm.usage().used == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"swap_space": 8 << 20, "preemption_mode": "swap"}, {}, {"async_scheduling": True}],
    ids=["swapped", "recomputed", "async"],
)
def test_preempted(reference: Reference, choices: list[int], options: dict[str, Any]) -> None:
    """Branches take no block that a sequence needs."""
    llm = with_oracle(reference, num_kv_blocks=12, max_model_len=96, watermark=0.0, **options)
    assert outputs_of(llm, reference.prompts * 2) == reference.outputs * 2
    # With fewer sequences than fit, there is room for branches.
    assert outputs_of(llm, reference.prompts[:2]) == reference.outputs[:2]
    assert choices
    assert llm.usage().used == 0


@pytest.mark.slow
def test_samples_and_log_probabilities_are_those_without_drafts(reference: Reference, choices: list[int]) -> None:
    """Also those that depend on the tokens before them, which a branch has other ones of."""
    params = SamplingParams(
        temperature=1.0, top_k=4, seed=12, max_tokens=NEW_TOKENS, n=2, repetition_penalty=1.2, logprobs=2
    )
    expected = load(reference).generate(reference.prompts, params, use_tqdm=False)
    pairs = zip(reference.prompts, expected, strict=True)
    llm = with_oracle(reference, [prompt + one.token_ids for prompt, output in pairs for one in output.outputs])
    found = llm.generate(reference.prompts, params, use_tqdm=False)
    check(llm.engine.scheduler.memory)
    for output, other in zip(found, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in other.outputs]
        for one, two in zip(output.outputs, other.outputs, strict=True):
            assert one.cumulative_logprob == pytest.approx(two.cumulative_logprob, rel=1e-4)
    assert choices


@pytest.mark.slow
def test_a_draft_model_proposes_its_next_likeliest_tokens(
    reference: Reference, choices: list[int], tmp_path: Path
) -> None:
    llm = with_model(reference, noisy_copy(reference.folder, tmp_path))
    for _ in range(2):
        assert outputs_of(llm, reference.prompts) == reference.outputs
    stats = llm.stats
    assert choices or stats.num_accepted_tokens > 2 * stats.num_drafts, "drafts were wrong, and no branch was right"
    # Also where some steps are planned while another one runs.
    same = with_model(reference, tmp_path, async_scheduling=True, max_num_seqs=9, max_num_batched_tokens=20)
    assert isinstance(same.engine, AsyncEngine)
    assert outputs_of(same, reference.prompts) == reference.outputs


def test_a_head_proposes_its_next_likeliest_tokens(
    choices: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its states are copied for branches, as all recurrent states are."""
    reference = noisy_model(tmp_path_factory)
    llm = load(reference, speculative_method="mtp", num_speculative_tokens=3, num_speculative_branches=NUM_BRANCHES)
    with_free_drafts(llm)
    assert outputs_of(llm, reference.prompts) == reference.outputs
    assert outputs_of(llm, reference.prompts * 2) == reference.outputs * 2
    assert len(choices) > 5
    check(llm.engine.scheduler.memory)
