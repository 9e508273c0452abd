"""Synthetic requests whose lengths have the published means of two datasets; seeded, so that a run can be repeated.

| trace | mean prompt | mean output |
|---|---|---|
| ShareGPT | 161 | 338 |
| Alpaca | 19 | 58 |

Only the means are published. The shape is an assumption: log-normal, prompts and outputs independent, each at most half
of the model's length, so that a request always fits.

Source: Kwon et al., PagedAttention (SOSP 2023), for the means.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean
from typing import NamedTuple

# Standard deviation of a length's logarithm: one length in twenty is more than five times the median.
SPREAD = 1.0


class Dataset(NamedTuple):
    """Mean lengths, in tokens."""

    mean_prompt: int
    mean_output: int


DATASETS = {"ShareGPT": Dataset(161, 338), "Alpaca": Dataset(19, 58)}


class DatasetRequest(NamedTuple):
    """One request: its prompt's token ids, and how many new tokens each sample gets."""

    prompt: list[int]
    num_new: int


def lengths(mean: float, limit: int, count: int, rng: random.Random, spread: float = SPREAD) -> list[int]:
    """Return log-normal lengths in a random order: equally likely ones, so that only their order is drawn.

    Args:
        mean: mean of the lengths after clipping, in tokens.
        limit: longer ones are clipped to it; more than `mean`.
        count: number of lengths.
        rng: draws the order.
        spread: standard deviation of the logarithm.
    """
    factors = [math.exp(spread * NormalDist().inv_cdf((place + 0.5) / count)) for place in range(count)]

    def scaled(median: float) -> list[int]:
        return [min(limit, max(1, round(median * factor))) for factor in factors]

    low, high = 0.0, limit / factors[0]
    while high - low > 1e-3:
        median = (low + high) / 2
        low, high = (median, high) if fmean(scaled(median)) < mean else (low, median)
    drawn = scaled(high)
    rng.shuffle(drawn)
    return drawn


def trace(dataset: Dataset, max_model_len: int, count: int, vocab_size: int, seed: int = 0) -> list[DatasetRequest]:
    """Return requests of random tokens, so that no two of them share a block."""
    rng = random.Random(seed)
    prompts = lengths(dataset.mean_prompt, max_model_len // 2, count, rng)
    outputs = lengths(dataset.mean_output, max_model_len // 2, count, rng)
    return [
        DatasetRequest([rng.randrange(vocab_size) for _ in range(num_prompt)], num_new)
        for num_prompt, num_new in zip(prompts, outputs, strict=True)
    ]
