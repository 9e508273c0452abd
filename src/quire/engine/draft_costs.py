"""What rows of drafts cost a step, beside one without drafts: measured as steps go by."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from quire.decoding.speculation import FIRST_ROW_COST

# How far one step moves what is believed: further if it took less time, for what else a machine does only adds to it.
DOWN_WEIGHT = 0.5
UP_WEIGHT = 0.1
# A step that something else held up is believed to have taken no more than so many times what was expected.
MOST_OFF = 2.0
# After so many steps with drafts in a row one without them is measured: contexts grow.
PATIENCE = 64
# Depths, the drafts of a step for each of its sequences, are told apart by so much.
GRAIN = 0.25


class DraftCosts:
    """Measures what steps take without drafts and with some, and says what a depth would cost.

    A step of `S` sequences is compared with the last ones of `S` sequences without drafts; only steps that decode and
    do nothing else count. What a depth costs is known where one was tried, by the size of `S`; between those a straight
    line is drawn, and beyond them the line from 0.

    Args:
        num_tokens: drafts of a sequence in a step at most.

    Attributes:
        wants_rest: True where the next step should have no drafts, so that it can be measured.
    """

    def __init__(self, num_tokens: int) -> None:
        self.wants_rest = False
        self._num_tokens = num_tokens
        self._plain_s: dict[int, float] = {}
        # By the bits of S: the depths that were tried, in order, and what each adds, as a share of a plain step.
        self._depths: dict[int, list[float]] = {}
        self._added: dict[int, dict[float, float]] = {}
        self._num_drafting = 0

    def note_step(self, num_seqs: int, num_drafts: int, elapsed_s: float) -> None:
        """Take in how long a step took that only decoded.

        Args:
            num_seqs: sequences of the step.
            num_drafts: drafts of all of them.
            elapsed_s: how long the data plane took.
        """
        plain_s = self._plain_s.get(num_seqs)
        if num_drafts:
            self._num_drafting += 1
            if plain_s:
                self._note_added(num_seqs, num_drafts / num_seqs, elapsed_s / plain_s - 1.0)
        else:
            self._num_drafting = 0
            expected_s = elapsed_s if plain_s is None else min(elapsed_s, MOST_OFF * plain_s)
            self._plain_s[num_seqs] = _moved(plain_s, expected_s)
        self.wants_rest = self._num_drafting >= PATIENCE or num_seqs not in self._plain_s

    def by_depth(self, num_seqs: int) -> Sequence[float]:
        """Return what a step takes in which each of some sequences has 0, 1, 2, ... drafts, beside the first."""
        return [1.0 + self._line(num_seqs.bit_length(), float(depth)) for depth in range(self._num_tokens + 1)]

    def _note_added(self, num_seqs: int, depth: float, added: float) -> None:
        """Take in what drafts added to a step, as a share of one without them."""
        size, place = num_seqs.bit_length(), max(1, round(depth / GRAIN)) * GRAIN
        known = self._added.setdefault(size, {})
        believed = known.get(place)
        expected = self._line(size, depth) if believed is None else believed
        measured = min(max(added, 0.0), MOST_OFF * (1.0 + expected) - 1.0) * place / depth
        known[place] = _moved(believed, measured)
        if believed is None:
            insort(self._depths.setdefault(size, []), place)

    def _line(self, size: int, depth: float) -> float:
        """Return what a depth adds to steps of a size."""
        depths, added = self._depths.get(size, ()), self._added.get(size, {})
        if not depths:
            return FIRST_ROW_COST * depth
        place = bisect_left(depths, depth)
        if place == len(depths):
            return added[depths[-1]] * depth / depths[-1]
        high, low = depths[place], depths[place - 1] if place else 0.0
        below = added[low] if place else 0.0
        return below + (added[high] - below) * (depth - low) / (high - low)


def _moved(believed: float | None, measured: float) -> float:
    """Return the new belief; the first measure is believed as it is."""
    if believed is None:
        return measured
    return believed + (DOWN_WEIGHT if measured < believed else UP_WEIGHT) * (measured - believed)
