"""The measurements of a simulation: times of requests, gaps between tokens, counters."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import sub

# Gaps between tokens are counted in ranges, each wider than the previous one by this ratio; the last one is open.
GAP_RATIO = 1.01
_SHORTEST_S, _LONGEST_S = 1e-7, 1e6
GAP_BOUNDS = [
    _SHORTEST_S * GAP_RATIO**idx for idx in range(math.ceil(math.log(_LONGEST_S / _SHORTEST_S) / math.log(GAP_RATIO)))
]


class SimulationSamples:
    """Times of the requests of one run, and counters."""

    __slots__ = ("arrivals_s", "ended_s", "first_s", "gaps", "num_cached", "num_new", "num_prompt", "num_rejected")

    def __init__(self) -> None:
        self.arrivals_s, self.first_s, self.ended_s = array("d"), array("d"), array("d")
        self.num_new, self.num_prompt, self.num_cached = array("q"), array("q"), array("q")
        self.gaps: Counter[int] = Counter()
        self.num_rejected = 0

    def add_gap(self, seconds: float, count: int = 1) -> None:
        """Count gaps between two tokens."""
        self.gaps[bisect_left(GAP_BOUNDS, seconds)] += count

    def add_gaps(self, before_s: float, moments_s: Sequence[float], count: int) -> None:
        """Count the gaps between consecutive times, at each of which `count` sequences got a token."""
        # Consecutive steps take about as long, so one or two ranges have all gaps, and they are nearly sorted.
        seconds = sorted(map(sub, moments_s, chain((before_s,), moments_s)))
        if not seconds:
            return
        gaps, start, last = self.gaps, 0, bisect_left(GAP_BOUNDS, seconds[-1])
        for idx in range(bisect_left(GAP_BOUNDS, seconds[0]), last):
            end = bisect_right(seconds, GAP_BOUNDS[idx], start)
            if start < end:
                gaps[idx] += (end - start) * count
                start = end
        gaps[last] += (len(seconds) - start) * count

    def add_request(
        self, arrival_s: float, first_s: float, ended_s: float, num_new: int, num_prompt: int, num_cached: int
    ) -> None:
        """Record a request that has ended."""
        self.arrivals_s.append(arrival_s)
        self.first_s.append(first_s)
        self.ended_s.append(ended_s)
        self.num_new.append(num_new)
        self.num_prompt.append(num_prompt)
        self.num_cached.append(num_cached)

    def __len__(self) -> int:
        return len(self.ended_s)

    def gap_percentile(self, share: float) -> float | None:
        """Return a percentile of the gaps, at most one percent too high; None without gaps."""
        wanted = math.ceil(share * sum(self.gaps.values()))
        for idx in sorted(+self.gaps):
            wanted -= self.gaps[idx]
            if wanted <= 0:
                return GAP_BOUNDS[min(idx, len(GAP_BOUNDS) - 1)]
        return None

    def snapshot(self) -> tuple[object, ...]:
        """Return all measurements as a comparable value, independent of the order of ends at equal times."""
        rows = zip(
            self.ended_s,
            self.arrivals_s,
            self.first_s,
            self.num_new,
            self.num_prompt,
            self.num_cached,
            strict=True,
        )
        return tuple(sorted(rows)), tuple(sorted((+self.gaps).items())), self.num_rejected
