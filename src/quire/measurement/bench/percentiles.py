"""Percentiles of measured values, and their text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return `PERCENTILES` of the values, and their mean; empty without values."""
    if not values:
        return {}
    ranked = sorted(values)
    # The smallest value that at least p percent of the values do not exceed.
    named = {f"p{p}": ranked[max(0, -(-len(ranked) * p // 100) - 1)] for p in PERCENTILES}
    return {"mean": statistics.fmean(ranked), **named}


def latency_lines(titled: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each title whose percentiles, in seconds, are not empty."""
    return [
        f"{title}: " + ", ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in values.items())
        for title, values in titled.items()
        if values
    ]
