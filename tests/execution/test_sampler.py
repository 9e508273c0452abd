"""The sampler: isolation between requests, penalty histories, and the meaning of its numbers."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.execution.sampling.logprobs import LOWEST
from quire.execution.sampling.sampler import Sampler
from quire.execution.sampling.token_history import TokenHistory
from quire.memory.results import NO_OPS
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, StepPlan
from quire.sequences.params import SamplingParams

CPU = torch.device("cpu")
VOCAB = 50


def new_sequence(
    params: SamplingParams, *, seed: int = 1, sample_idx: int = 0, output: tuple[int, ...] = ()
) -> NewSequence:
    return NewSequence(params, seed, sample_idx, 2, (1, 2, *output), (7,))


def opened(*openings: NewSequence, num_samples: int = 1) -> StepPlan:
    """Return a plan that computes all that is known of each sequence."""
    items = [ScheduledSequence(i, 0, new.token_ids, (), num_samples, new) for i, new in enumerate(openings)]
    return StepPlan(0, tuple(items), NO_OPS, ())


def step(sampler: Sampler, plan: StepPlan, logits: torch.Tensor) -> list[ItemResult]:
    sampler.begin_step(plan)
    return sampler.sample(logits.clone(), plan.items)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_own_item_only(bad: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, logprobs=2)
    plan = opened(*(new_sequence(params, seed=seed) for seed in range(3)))
    logits = random_logits(3)
    whole = step(Sampler(CPU), plan, logits)
    logits[1, 13] = bad
    broken = step(Sampler(CPU), plan, logits)
    assert broken[1] == ItemResult(1, (), error=broken[1].error)
    assert "not finite" in (broken[1].error or "")
    assert [broken[0], broken[2]] == [whole[0], whole[2]]


def test_a_request_that_excludes_every_token_fails_alone() -> None:
    nothing = SamplingParams(allowed_token_ids=(7,), min_tokens=1, logprobs=1)
    results = step(Sampler(CPU), opened(new_sequence(nothing), new_sequence(SamplingParams())), random_logits(2))
    assert "no token" in (results[0].error or "")
    assert results[0].logprobs == ()
    assert results[1].error is None


def test_samples_of_one_row_are_those_of_its_forks() -> None:
    params = SamplingParams(n=3, temperature=1.5)
    together = step(Sampler(CPU), opened(new_sequence(params), num_samples=3), random_logits(1))[0]
    forks = opened(*(new_sequence(params, sample_idx=sample_idx) for sample_idx in range(3)))
    apart = step(Sampler(CPU), forks, random_logits(1).repeat(3, 1))
    assert together.token_ids == tuple(result.token_ids[0] for result in apart)
    assert len(set(together.token_ids)) > 1


def test_a_closed_sequence_leaves_nothing_to_the_next_of_its_name() -> None:
    sampler = Sampler(CPU)
    best = int(random_logits(1).argmax())
    biased = SamplingParams(
        temperature=0.0,
        logit_bias={5: 100.0},
        frequency_penalty=2.0,
        dry_multiplier=9.0,
        bad_words=("a",),
        logits_processors=(lambda _prompt, _output, logits: logits.neg(),),
        top_n_sigma=0.1,
        typical_p=0.1,
    )
    step(sampler, opened(new_sequence(biased, output=(5, 5))._replace(bad_words=((best,),))), random_logits(1))
    sampler.begin_step(StepPlan(1, (), NO_OPS, (0, 99)))
    assert sampler.num_open == 0
    plain = step(sampler, opened(new_sequence(SamplingParams(temperature=0.0))), random_logits(1))
    assert plain[0].token_ids == (best,)


def test_greedy_samples_of_one_row_are_all_the_likeliest() -> None:
    plan = opened(new_sequence(SamplingParams(temperature=0.0, n=2)), num_samples=2)
    best = int(random_logits(1).argmax())
    assert step(Sampler(CPU), plan, random_logits(1))[0].token_ids == (best, best)


def test_an_opening_forgets_the_history_before_it() -> None:
    sampler = Sampler(CPU)
    penalized = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    step(sampler, opened(new_sequence(penalized)), random_logits(1))
    step(sampler, opened(new_sequence(SamplingParams(temperature=0.0), output=(3, 4, 5))), random_logits(1))
    # Past what the first sequence of this name had: its history would have a hole.
    later = StepPlan(2, (ScheduledSequence(0, 9, (1,), (), 1, None),), NO_OPS, ())
    assert step(sampler, later, random_logits(1))[0].token_ids == (int(random_logits(1).argmax()),)


def test_an_opening_replaces_what_was_known() -> None:
    sampler = Sampler(CPU)
    step(sampler, opened(new_sequence(SamplingParams(temperature=0.0, logit_bias={5: 100.0}))), random_logits(1))
    plain = step(sampler, opened(new_sequence(SamplingParams(temperature=0.0))), random_logits(1))
    assert plain[0].token_ids == (int(random_logits(1).argmax()),)


def test_suppressed_tokens_come_back_after_min_tokens() -> None:
    sampler = Sampler(CPU)
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 9.0  # the suppressed one
    logits[0, 3] = 5.0
    drawn = [step(sampler, opened(new_sequence(params)), logits)[0].token_ids[0]]
    for start in range(2, 5):
        plan = StepPlan(start, (ScheduledSequence(0, start, (drawn[-1],), (), 1, None),), NO_OPS, ())
        drawn.append(step(sampler, plan, logits)[0].token_ids[0])
    assert drawn == [3, 3, 7, 7]


def test_end_tokens_that_the_model_does_not_have_need_no_suppression() -> None:
    logits = random_logits(1)
    logits[0, 7] = 99.0
    new = new_sequence(SamplingParams(temperature=0.0, min_tokens=2))._replace(suppressed_ids=(VOCAB + 3, 7))
    expected = logits.clone()
    expected[0, 7] = -math.inf
    assert step(Sampler(CPU), opened(new), logits)[0].token_ids == (int(expected.argmax()),)


def test_penalties_do_not_depend_on_how_the_history_was_built() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.9)
    stepwise = Sampler(CPU)
    plan = opened(new_sequence(params))
    output: tuple[int, ...] = ()
    for tick in range(12):
        logits = random_logits(1, seed=tick // 4)  # the same wish four times in a row
        drawn = step(stepwise, plan, logits)[0].token_ids
        whole = step(Sampler(CPU), opened(new_sequence(params, output=output)), logits)[0].token_ids
        assert drawn == whole
        plan = StepPlan(tick, (ScheduledSequence(0, 2 + len(output), drawn, (), 1, None),), NO_OPS, ())
        output += drawn
    assert len(set(output)) > 3


def test_a_token_that_was_rolled_back_is_not_penalized() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=5.0, presence_penalty=2.0)
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 20] = 1.0
    logits[0, 21] = 0.5
    sampler = Sampler(CPU)
    assert step(sampler, opened(new_sequence(params, output=(20, 20))), logits)[0].token_ids == (21,)
    rewritten = StepPlan(1, (ScheduledSequence(0, 2, (30, 31), (), 1, None),), NO_OPS, ())
    assert step(sampler, rewritten, logits)[0].token_ids == (20,)


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    params = SamplingParams(temperature=2.0, top_k=5, repetition_penalty=3.0, logit_bias={11: 50.0}, logprobs=4)
    logits = random_logits(2).bfloat16().float()
    results = step(Sampler(CPU), opened(new_sequence(params), new_sequence(params, seed=2), num_samples=3), logits)
    for row, result in zip(logits.double(), results, strict=True):
        expected = row.log_softmax(-1)
        ranked = sorted(range(VOCAB), key=lambda i: (-row[i].item(), i))
        assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
        for entry in result.logprobs:
            assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-5)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            assert [token_id for token_id, _ in entry.top] == ranked[:4]
            assert [value for _, value in entry.top] == pytest.approx(expected[ranked[:4]].tolist(), abs=1e-5)


def test_logprobs_of_masked_tokens_stay_finite() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3] = 1.0
    params = SamplingParams(temperature=0.0, logprobs=2)
    entry = step(Sampler(CPU), opened(new_sequence(params)), logits)[0].logprobs[0]
    assert (entry.token_id, entry.logprob, entry.rank) == (3, 0.0, 1)
    assert entry.top[1][1] == LOWEST


def test_the_first_of_equal_logits_is_greedy_and_heads_the_list() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 30, 41]] = 2.0
    result = step(Sampler(CPU), opened(new_sequence(SamplingParams(temperature=0.0, logprobs=2))), logits)[0]
    assert result.token_ids == (9,)
    assert [token_id for token_id, _ in result.logprobs[0].top] == [9, 30]


@given(
    tokens=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    num_prompt=st.integers(1, 12),
    moves=st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans())),
)
def test_a_history_counts_what_it_was_told(
    tokens: list[int], num_prompt: int, moves: list[tuple[int, list[int], bool]]
) -> None:
    """Appends, chunks of what is known, roll backs and rewrites, against counting anew."""
    num_prompt = min(num_prompt, len(tokens))
    history = TokenHistory(tokens, num_prompt)
    for back, given_ids, is_end in moves:
        start = max(0, len(tokens) - back)
        end = start + len(given_ids)
        is_known = tokens[start:end] == given_ids
        tokens = tokens if is_known and not is_end else tokens[:start] + given_ids
        history.sync(start, given_ids, is_end=is_end)
        counts = history.counts()
        rows = list(zip(*(column.tolist() for column in counts), strict=True))
        assert {i: n for i, n, _ in rows if n} == Counter(tokens)
        assert {i: n for i, _, n in rows if n} == Counter(tokens[num_prompt:])
