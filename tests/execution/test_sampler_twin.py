"""The sampler against its slow twin."""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.execution.sampling.sampler import Sampler
from quire.execution.sampling.sampling import Filter, draw, uniform
from quire.memory.results import NO_OPS
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, StepPlan
from quire.sequences.params import SamplingParams
from tests.execution.sampler_twin import VOCAB, adjusted, chosen, kept, openings

CPU = torch.device("cpu")
# How far float32 may move a share of the distribution.
SLACK = 3e-6


def accepted(values: list[float], params: SamplingParams, point: float) -> set[int]:
    """Return what may be drawn where rounding moves the point or a filter's edge by a hair."""
    points = {min(max(point + shift, 0.0), 1.0 - 1e-12) for shift in (-SLACK, SLACK)}
    top_ps = {params.top_p * (1 + shift) for shift in (-SLACK, SLACK)} if params.top_p < 1 else {1.0}
    typical_ps = {params.typical_p * (1 + shift) for shift in (-SLACK, SLACK)} if params.typical_p < 1 else {1.0}
    num_sigmas = {params.top_n_sigma * (1 + shift) for shift in (-SLACK, SLACK)}
    min_ps = {min(params.min_p * (1 + shift), 1.0) for shift in (-SLACK, SLACK)}
    return {
        chosen(values, Filter(params.temperature, params.top_k, top_p, min_p, typical_p, sigmas), near)
        for near, top_p, min_p, typical_p, sigmas in itertools.product(points, top_ps, min_ps, typical_ps, num_sigmas)
    }


def sample(logits: torch.Tensor, openings: list[NewSequence], num_samples: list[int]) -> list[ItemResult]:
    """Sample one step in which every sequence is opened."""
    items = [
        ScheduledSequence(seq_id, 0, new_sequence.token_ids, (), count, new_sequence)
        for seq_id, (new_sequence, count) in enumerate(zip(openings, num_samples, strict=True))
    ]
    sampler = Sampler(CPU)
    sampler.begin_step(StepPlan(0, tuple(items), NO_OPS, ()))
    return sampler.sample(logits.clone(), items)


def check(logits: torch.Tensor, openings: list[NewSequence], num_samples: list[int]) -> None:
    """Compare a batch's tokens with the twin's, and each item with itself alone."""
    together = sample(logits, openings, num_samples)
    for row, (new_sequence, count, result) in enumerate(zip(openings, num_samples, together, strict=True)):
        values = adjusted(logits[row].double().tolist(), new_sequence)
        if max(values) == -math.inf:
            assert result.error is not None
            assert result.token_ids == ()
            continue
        assert result.error is None
        assert len(result.token_ids) == count
        for draw_idx, token_id in enumerate(result.token_ids):
            point = uniform(new_sequence.seed, new_sequence.sample_idx + draw_idx, len(new_sequence.token_ids))
            assert token_id in accepted(values, new_sequence.params, point), new_sequence.params
        alone = sample(logits[row : row + 1], [new_sequence], [count])[0]
        assert alone.token_ids == result.token_ids


@settings(max_examples=80)
@given(
    batch=st.lists(openings(), min_size=1, max_size=5),
    num_samples=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    spread=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_every_knob_and_mixture_equals_the_twin(
    batch: list[NewSequence], num_samples: list[int], spread: int, seed: int
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
