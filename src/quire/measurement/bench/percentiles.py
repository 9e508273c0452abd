"""Percentiles of measured values, and their representation as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return `PERCENTILES` of the values, and their mean; empty without values."""
    if not values:
        return {}
    ranked = sorted(values)
    # The p-th percentile is the smallest value that is not exceeded by at least p percent of the values.
    named = {f"p{p}": ranked[max(0, -(-len(ranked) * p // 100) - 1)] for p in PERCENTILES}
    return {"mean": statistics.fmean(ranked), **named}


def latency_lines(titled: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each title with percentiles, which are in seconds."""
    return [
        f"{title}: " + ", ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in values.items())
        for title, values in titled.items()
        if values
    ]
