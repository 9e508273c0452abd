"""Measures the added duration of a decode step with draft tokens, by drafts per sequence."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from quire.engine.control.chunk_size import moving_average
from quire.sequences.decoding.speculation import FIRST_ROW_COST

# Weights of a new measurement below or above the average: other load of the machine only adds time.
FASTER_WEIGHT = 0.5
SLOWER_WEIGHT = 0.1
# Outliers are clipped to this multiple of the expected duration.
MAX_RATIO = 2.0
# Steps from one measurement without drafts to the next: contexts grow.
BASELINE_INTERVAL = 64
# Resolution of depths. A depth is the mean number of drafts per sequence of a step.
DEPTH_RESOLUTION = 0.25


class DraftCosts:
    """Measures decode steps with and without draft tokens, and predicts the relative duration for any depth.

    A step of `S` sequences is compared with recent steps of `S` sequences without drafts (the baseline). The added cost
    is stored for each measured depth, by the bit length of `S`; between measured depths it is interpolated linearly,
    beyond the largest extrapolated in proportion to the depth.

    A step that overlaps another in flight is not measured: the time between their ends is the longer of the device's
    and the host's time for a step, and less if the host was late to read the first one. The time of a step that runs
    alone, from launch to end, is reliable: other load can only add to it.

    Args:
        num_tokens: largest number of drafts of a sequence in a step.

    Attributes:
        needs_baseline: True if the next step should have no drafts, so that the baseline is measured.
    """

    def __init__(self, num_tokens: int) -> None:
        self.needs_baseline = False
        self._num_tokens = num_tokens
        self._baseline_s: dict[int, float] = {}
        # By the bit length of S: the measured depths in ascending order, and the added cost of each, relative to the
        # baseline.
        self._depths: dict[int, list[float]] = {}
        self._added: dict[int, dict[float, float]] = {}
        self._num_since_baseline = 0

    def record_step(self, num_seqs: int, num_drafts: int, elapsed_s: float | None) -> None:
        """Record the duration of a step that only decoded.

        Args:
            num_seqs: sequences of the step.
            num_drafts: drafts of all sequences together.
            elapsed_s: duration in seconds; None if the step overlapped another.
        """
        baseline_s = self._baseline_s.get(num_seqs)
        if num_drafts or elapsed_s is None:
            self._num_since_baseline += 1
            if baseline_s and elapsed_s is not None:
                self._record_added(num_seqs, num_drafts / num_seqs, elapsed_s / baseline_s - 1.0)
        else:
            self._num_since_baseline = 0
            clipped_s = elapsed_s if baseline_s is None else min(elapsed_s, MAX_RATIO * baseline_s)
            self._baseline_s[num_seqs] = _average(baseline_s, clipped_s)
        self.needs_baseline = self._num_since_baseline >= BASELINE_INTERVAL or num_seqs not in self._baseline_s

    def by_depth(self, num_seqs: int) -> Sequence[float]:
        """Return the predicted duration with 0, 1, 2, ... drafts per sequence, relative to a step without."""
        return [1.0 + self._added_at(num_seqs.bit_length(), float(depth)) for depth in range(self._num_tokens + 1)]

    def _record_added(self, num_seqs: int, depth: float, added: float) -> None:
        """Record the added cost of drafts, relative to the baseline."""
        size, rounded = num_seqs.bit_length(), max(1, round(depth / DEPTH_RESOLUTION)) * DEPTH_RESOLUTION
        costs = self._added.setdefault(size, {})
        cost = costs.get(rounded)
        expected = self._added_at(size, depth) if cost is None else cost
        clipped = min(max(added, 0.0), MAX_RATIO * (1.0 + expected) - 1.0) * rounded / depth
        costs[rounded] = _average(cost, clipped)
        if cost is None:
            insort(self._depths.setdefault(size, []), rounded)

    def _added_at(self, size: int, depth: float) -> float:
        """Return the added cost at a depth for a size class."""
        depths, added = self._depths.get(size, ()), self._added.get(size, {})
        if not depths:
            return FIRST_ROW_COST * depth
        idx = bisect_left(depths, depth)
        if idx == len(depths):
            return added[depths[-1]] * depth / depths[-1]
        high, low = depths[idx], depths[idx - 1] if idx else 0.0
        below = added[low] if idx else 0.0
        return below + (added[high] - below) * (depth - low) / (high - low)


def _average(average: float | None, sample: float) -> float:
    """Return the moving average after a sample; faster samples weigh more."""
    is_faster = average is not None and sample < average
    return moving_average(average, sample, FASTER_WEIGHT if is_faster else SLOWER_WEIGHT)
