"""Beam candidates, against a search through all rows in plain Python, and isolation of failing searches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.execution.sampling.beam_sampling import sample_beams
from quire.execution.sampling.sampler import Sampler
from quire.memory.results import NO_OPS
from quire.scheduling.plan import BeamGroup, Candidate, ItemResult, NewSequence, ScheduledSequence, StepPlan
from quire.sequences.params import SamplingParams

CPU = torch.device("cpu")
VOCAB = 50
BEAMS = SamplingParams(beam_width=4)


def new_sequence(params: SamplingParams, output: tuple[int, ...] = ()) -> NewSequence:
    return NewSequence(params, 1, 0, 2, (1, 2, *output), (7,))


def plan_of(
    groups: list[list[NewSequence]], others: list[NewSequence], scores: list[list[float]], count: int
) -> StepPlan:
    """Return a plan whose items stand in the order of groups, with the others between them."""
    items: list[ScheduledSequence] = []
    beams = []
    for idx, group in enumerate(groups):
        ids = tuple(range(len(items), len(items) + len(group)))
        items += [
            ScheduledSequence(seq_id, 0, new.token_ids, (), 1, new) for seq_id, new in zip(ids, group, strict=True)
        ]
        beams.append(BeamGroup(ids, tuple(scores[idx]), count))
        for new in others[idx : idx + 1]:
            items.append(ScheduledSequence(len(items), 0, new.token_ids, (), 1, new))
    return StepPlan(0, tuple(items), NO_OPS, (), tuple(beams))


def search(plan: StepPlan, logits: torch.Tensor) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
    sampler = Sampler(CPU)
    sampler.begin_step(plan)
    return sample_beams(sampler, logits.clone(), plan.items, plan.beams)


def slow_candidates(logits: torch.Tensor, scores: list[float], count: int) -> list[tuple[int, int, float]]:
    """Return the best continuations by sorting all of them."""
    ways = []
    for parent, (row, score) in enumerate(zip(logits.log_softmax(-1).tolist(), scores, strict=True)):
        ways += [(parent, token, score + logprob) for token, logprob in enumerate(row) if logprob > -math.inf]
    return sorted(ways, key=lambda way: (-way[2], way[0], way[1]))[:count]


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    count=st.integers(1, 40),
    vocab=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_candidates_are_those_of_all_continuations(sizes: list[int], count: int, vocab: int, seed: int) -> None:
    """Groups of several sizes, more candidates than there are tokens, or than there are continuations."""
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(size, generator=generator).tolist() for size in sizes]
    plan = plan_of([[new_sequence(BEAMS)] * size for size in sizes], [], scores, count)
    logits = random_logits(sum(sizes), seed, vocab)
    results, found = search(plan, logits)
    assert results == [ItemResult(item.seq_id, ()) for item in plan.items]
    first = 0
    for size, own, candidates in zip(sizes, scores, found, strict=True):
        expected = slow_candidates(logits[first : first + size], own, count)
        first += size
        assert [(one.parent_idx, one.token_id) for one in candidates] == [way[:2] for way in expected]
        assert [one.score for one in candidates] == pytest.approx([way[2] for way in expected], abs=1e-5)


def test_ties_go_to_the_earlier_beam_then_the_lower_token() -> None:
    plan = plan_of([[new_sequence(BEAMS)] * 2], [], [[0.0, 0.0]], 5)
    (candidates,) = search(plan, torch.zeros(2, VOCAB))[1]
    assert [(one.parent_idx, one.token_id) for one in candidates] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]


def test_beams_and_samples_of_one_step_do_not_see_each_other() -> None:
    sampled = SamplingParams(temperature=1.0, seed=3, logprobs=2, repetition_penalty=1.5)
    scores = [[-1.0, -2.0, -3.0], [-0.5]]
    groups, others = (
        [[new_sequence(BEAMS, (4, 5))] * 3, [new_sequence(BEAMS)]],
        [new_sequence(sampled), new_sequence(sampled, (9,))],
    )
    plan = plan_of(groups, others, scores, 8)
    logits = random_logits(6)
    results, found = search(plan, logits)
    sampler = Sampler(CPU)
    alone = plan._replace(items=(plan.items[3], plan.items[5]), beams=())
    sampler.begin_step(alone)
    assert [results[3], results[5]] == sampler.sample(logits[[3, 5]].clone(), alone.items)
    for group, rows, own in zip(found, ([0, 1, 2], [4]), scores, strict=True):
        expected = slow_candidates(logits[rows], own, 8)
        assert [(one.parent_idx, one.token_id) for one in group] == [way[:2] for way in expected]


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        ({"logit_bias": {5: 2.0, 6: -2.0}}, {5: 2.0, 6: -2.0}),
        ({"allowed_token_ids": (3, 4, 5)}, {token: -math.inf for token in range(VOCAB) if token not in (3, 4, 5)}),
        ({"min_tokens": 2}, {7: -math.inf}),
    ],
)
def test_adjusted_beam_log_probabilities_are_not_renormalized(
    changes: dict[str, Any], change: dict[int, float]
) -> None:
    plan = plan_of([[new_sequence(SamplingParams(beam_width=2, **changes))]], [], [[0.0]], VOCAB)
    logits = random_logits(1)
    (candidates,) = search(plan, logits)[1]
    known = {
        token: logprob + change.get(token, 0.0) for token, logprob in enumerate(logits.log_softmax(-1)[0].tolist())
    }
    possible = {token: logprob for token, logprob in known.items() if logprob > -math.inf}
    assert {one.token_id: one.score for one in candidates} == pytest.approx(possible, abs=1e-5)


def test_a_repetition_penalty_multiplies_log_probabilities() -> None:
    params = SamplingParams(beam_width=2, repetition_penalty=1.5)
    plan = plan_of([[new_sequence(params, (11,))]], [], [[0.0]], VOCAB)
    logits = random_logits(1)
    (candidates,) = search(plan, logits)[1]
    raw = logits.log_softmax(-1)[0].tolist()
    expected = {token: raw[token] * (1.5 if token in (1, 2, 11) else 1.0) for token in range(VOCAB)}
    assert {one.token_id: one.score for one in candidates} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_their_own_search_only(bad: float) -> None:
    plan = plan_of([[new_sequence(BEAMS)] * 2, [new_sequence(BEAMS)] * 2], [], [[0.0, -1.0], [0.0, -1.0]], 4)
    logits = random_logits(4)
    whole = search(plan, logits)[1]
    logits[1, 13] = bad
    results, found = search(plan, logits)
    assert "not finite" in (results[1].error or "")
    assert [result.error for result in results[2:]] == [None, None]
    assert found == ((), whole[1])


def test_a_processor_that_raises_fails_its_own_search_only() -> None:
    def fails(*_: object) -> torch.Tensor:
        raise KeyError

    own = SamplingParams(beam_width=2, logits_processors=[fails])  # type: ignore[arg-type]
    plan = plan_of([[new_sequence(own)], [new_sequence(BEAMS)]], [], [[0.0], [0.0]], 4)
    logits = random_logits(2)
    results, found = search(plan, logits)
    assert "raised KeyError" in (results[0].error or "")
    assert results[1].error is None
    assert found[0] == ()
    assert len(found[1]) == 4


def test_log_probabilities_are_those_of_the_row_as_the_model_gave_it() -> None:
    params = SamplingParams(beam_width=2, logprobs=3, logit_bias={20: 5.0})
    plan = plan_of([[new_sequence(params)] * 2], [], [[0.0, -0.5]], 6)
    logits = random_logits(2)
    (candidates,) = search(plan, logits)[1]
    raw = logits.log_softmax(-1)
    for one in candidates:
        assert one.logprobs is not None
        assert one.logprobs.token_id == one.token_id
        assert one.logprobs.logprob == pytest.approx(float(raw[one.parent_idx, one.token_id]), abs=1e-5)
        assert [token for token, _ in one.logprobs.top] == raw[one.parent_idx].topk(3).indices.tolist()


def test_all_that_is_impossible_is_left_out() -> None:
    params = SamplingParams(beam_width=2, allowed_token_ids=(7,), min_tokens=1)
    plan = plan_of([[new_sequence(params)]], [], [[0.0]], 4)
    results, found = search(plan, random_logits(1))
    assert results == [ItemResult(0, ())]
    assert found == ((),)


def test_rows_beyond_a_tile_are_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of([[new_sequence(SamplingParams(beam_width=5, logprobs=1))] * 5], [], [[0.0] * 5], 10)
    logits = random_logits(5)
    whole = search(plan, logits)
    monkeypatch.setattr("quire.execution.sampling.beam_candidates.rows_per_tile", lambda _: 2)
    assert search(plan, logits) == whole
