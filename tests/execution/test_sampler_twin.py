"""The sampler against its slow twin: one row at a time, in plain Python floats."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.execution.draws import Filter, draw, uniform
from quire.execution.sampler import Sampler
from quire.memory.ops import NO_OPS
from quire.scheduling.plan import ItemResult, Opening, PlanItem, StepPlan
from quire.sequences.params import SamplingParams

CPU = torch.device("cpu")
# How far float32 may move a share of the distribution.
SLACK = 3e-6


def adjusted(logits: list[float], opening: Opening) -> list[float]:
    """Return a row's logits after masks, bias and penalties."""
    params = opening.params
    values = list(logits)
    if params.allowed_token_ids is not None:
        values = [value if i in params.allowed_token_ids else -math.inf for i, value in enumerate(values)]
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] += bias
    output = Counter(opening.token_ids[opening.num_prompt :])
    if output.total() < params.min_tokens:
        for token_id in opening.suppressed_ids:
            values[token_id] = -math.inf
    for token_id in set(opening.token_ids):
        if values[token_id] > 0:
            values[token_id] /= params.repetition_penalty
        else:
            values[token_id] *= params.repetition_penalty
    for token_id, count in output.items():
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return values


def kept(values: list[float], filters: Filter) -> dict[int, float]:
    """Return the tokens that may be drawn, in the order of the draw, and the share of each."""
    best = max(values)
    weights = {i: math.exp((value - best) / filters.temperature) for i, value in enumerate(values)}
    if not filters.keeps_all:
        ranked = sorted(weights, key=lambda i: (-values[i], i))
        ranked = [i for i in ranked if weights[i] >= filters.min_p]
        ranked = ranked[: filters.top_k or len(ranked)]
        wanted = filters.top_p * math.fsum(weights[i] for i in ranked)
        sums = itertools.accumulate((weights[i] for i in ranked), initial=0.0)
        weights = {i: weights[i] for i, before in zip(ranked, sums, strict=False) if before < wanted}
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def chosen(values: list[float], filters: Filter, point: float) -> int:
    """Return the token that `point` in [0, 1) draws."""
    if filters.temperature == 0.0:
        return values.index(max(values))
    shares = kept(values, filters)
    place = bisect.bisect_right(list(itertools.accumulate(shares.values())), point)
    return list(shares)[min(place, len(shares) - 1)]


def accepted(values: list[float], params: SamplingParams, point: float) -> set[int]:
    """Return what may be drawn where rounding moves the point or a filter's edge by a hair."""
    points = {min(max(point + shift, 0.0), 1.0 - 1e-12) for shift in (-SLACK, SLACK)}
    top_ps = {params.top_p * (1 + shift) for shift in (-SLACK, SLACK)} if params.top_p < 1 else {1.0}
    min_ps = {min(params.min_p * (1 + shift), 1.0) for shift in (-SLACK, SLACK)}
    return {
        chosen(values, Filter(params.temperature, params.top_k, top_p, min_p), near)
        for near, top_p, min_p in itertools.product(sorted(points), sorted(top_ps), sorted(min_ps))
    }


def sample(logits: torch.Tensor, openings: list[Opening], num_samples: list[int]) -> list[ItemResult]:
    """Sample one step in which every sequence is opened."""
    items = [
        PlanItem(seq_id, 0, opening.token_ids, (), count, opening)
        for seq_id, (opening, count) in enumerate(zip(openings, num_samples, strict=True))
    ]
    sampler = Sampler(CPU)
    sampler.follow(StepPlan(0, tuple(items), NO_OPS, ()))
    return sampler.sample(logits.clone(), items)


def check(logits: torch.Tensor, openings: list[Opening], num_samples: list[int]) -> None:
    """Compare a batch's tokens with the twin's, and each item with itself alone."""
    together = sample(logits, openings, num_samples)
    for row, (opening, count, result) in enumerate(zip(openings, num_samples, together, strict=True)):
        values = adjusted(logits[row].double().tolist(), opening)
        if max(values) == -math.inf:
            assert result.error is not None
            assert result.token_ids == ()
            continue
        assert result.error is None
        assert len(result.token_ids) == count
        for draw_idx, token_id in enumerate(result.token_ids):
            point = uniform(opening.seed, opening.sample_idx + draw_idx, len(opening.token_ids))
            assert token_id in accepted(values, opening.params, point), opening.params
        alone = sample(logits[row : row + 1], [opening], [count])[0]
        assert alone.token_ids == result.token_ids


VOCAB = 40
token = st.integers(0, VOCAB - 1)
quarter = st.integers(-24, 24).map(lambda n: n / 4)


@st.composite
def openings(draw: st.DrawFn) -> Opening:
    options: dict[str, Any] = {}
    knobs = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.integers(1, VOCAB + 5),
        "top_p": st.sampled_from([0.01, 0.37, 0.8, 0.951, 0.9999]),
        "min_p": st.sampled_from([0.001, 0.07, 0.6, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.25, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.25, 1.5]),
        "frequency_penalty": st.sampled_from([-1.5, 0.5, 2.0]),
        "logit_bias": st.dictionaries(token, quarter, max_size=4),
        "allowed_token_ids": st.lists(token, min_size=1, max_size=6),
        "min_tokens": st.integers(1, 6),
    }
    for name in draw(st.sets(st.sampled_from(sorted(knobs)))):
        options[name] = draw(knobs[name])
    prompt = draw(st.lists(token, min_size=1, max_size=8))
    output = draw(st.lists(token, max_size=8))
    return Opening(
        params=SamplingParams(**options),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        sample_idx=draw(st.integers(0, 5)),
        num_prompt=len(prompt),
        token_ids=tuple(prompt + output),
        suppressed_ids=tuple(draw(st.lists(token, max_size=3))),
    )


@settings(max_examples=150)
@given(
    batch=st.lists(openings(), min_size=1, max_size=5),
    num_samples=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    spread=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_every_knob_and_mixture_equals_the_twin(
    batch: list[Opening], num_samples: list[int], spread: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Quarters are exact in float32, so that ties are ties in both worlds.
    logits = torch.randint(-spread, spread + 1, (len(batch), VOCAB), generator=generator) / 4
    check(logits, batch, num_samples[: len(batch)])


FILTERS = {
    "whole": Filter(1.0, 0, 1.0, 0.0),
    "nucleus": Filter(1.0, 0, 0.9, 0.0),
    "narrow nucleus": Filter(0.7, 0, 0.2, 0.0),
    "top_k": Filter(1.0, 40, 1.0, 0.0),
    "wide top_k": Filter(2.0, 700, 1.0, 0.0),
    "top_k and nucleus": Filter(1.0, 1500, 0.97, 0.0),
    "top_k and half": Filter(1.0, 300, 0.5, 0.0),
    "min_p": Filter(1.0, 0, 1.0, 0.01),
    "min_p and nucleus": Filter(1.0, 0, 0.99, 0.01),
    "min_p and wide nucleus": Filter(2.0, 0, 0.9, 0.004),
    "min_p and a third": Filter(2.0, 0, 0.3, 0.02),
    "all three": Filter(1.5, 400, 0.8, 0.002),
    "more than all": Filter(1.0, 10**6, 0.999, 0.0),
}


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.5, 6.0])
def test_wide_vocabularies_keep_what_the_twin_keeps(spread: float) -> None:
    """More tokens than one chunk and than the first widths, with the many ties of 16-bit logits.

    A comb of points shows every likely token; the last point shows where the kept tokens end.
    """
    comb = [i / 2000 for i in range(2000)] + [1.0 - 1e-9]
    points = torch.tensor([comb] * len(FILTERS), dtype=torch.float64)
    logits = spread * torch.randn(1, 4803, generator=torch.Generator().manual_seed(int(spread)))
    logits = logits.bfloat16().float()
    drawn = draw(logits.repeat(len(FILTERS), 1), list(FILTERS.values()), points)
    for name, ids in zip(FILTERS, drawn.tolist(), strict=True):
        share = kept(logits[0].tolist(), FILTERS[name])
        reached = list(itertools.accumulate(share.values()))
        tokens = list(share)
        for point, token_id in zip(comb[:-1], ids, strict=False):
            low, high = (bisect.bisect_right(reached, point + shift) for shift in (-SLACK, SLACK))
            assert token_id in tokens[low : high + 1], (name, point)
        assert ids[-1] == tokens[bisect.bisect_right(reached, comb[-1])], name
