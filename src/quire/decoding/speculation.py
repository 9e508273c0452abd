"""How many drafts a sequence is given: as many as pay, by what became of its last ones and by what rows cost.

A step with `k` drafts gives `1 + a + a^2 + ... + a^k` tokens, if each is right with probability `a` where those before
it were. It takes longer by what its rows cost beside a step without drafts, which the engine measures. The best `k` has
the greatest quotient of the two; 0 where that is no more than 1.

Nobody's tokens depend on drafts. So a drafter that raises is asked no more, and sequences go on without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Any

from quire.decoding.drafting import Drafter
from quire.sequences.sequence import Sequence

logger = logging.getLogger(__name__)

# What a draft's row is taken to cost beside a whole step, until that was measured.
FIRST_ROW_COST = 0.08
# Drafts have to promise so much more than they cost: what is believed of both is not exact.
MARGIN = 1.03
# What a judged draft's weight has become when another one is judged, of one sequence and of all.
MEMORY = 0.9
COMMON_MEMORY = 0.98
# As how many drafts of its own a sequence takes what is known of all.
PRIOR_DRAFTS = 2.0
# Where no drafts pay, one is tried again after so many tokens; twice as many after each that was wrong.
FIRST_PAUSE = 16
LONGEST_PAUSE = 256


class AcceptanceRate:
    """How often drafts are right: those that were judged, each counting less with every later one.

    Args:
        memory: what one's weight becomes when another is judged.
    """

    __slots__ = ("memory", "num_right", "num_wrong")

    def __init__(self, memory: float, num_right: float = 0.0, num_wrong: float = 0.0) -> None:
        self.memory = memory
        self.num_right = num_right
        self.num_wrong = num_wrong

    def add(self, num_right: int, num_wrong: int) -> None:
        """Take in what became of drafts; behind the first wrong one none is judged."""
        kept = self.memory ** (num_right + num_wrong)
        self.num_right = self.num_right * kept + num_right
        self.num_wrong = self.num_wrong * kept + num_wrong

    def share(self, prior: float, weight: float) -> float:
        """Return the share of right ones, as if there were `weight` more of which `prior` were right."""
        return (self.num_right + prior * weight) / (self.num_right + self.num_wrong + weight)


class _Record:
    """What is remembered of a live sequence: how its drafts fared, and how long none are tried."""

    __slots__ = ("hits", "interval", "is_probing", "pause")

    def __init__(self) -> None:
        self.hits = AcceptanceRate(MEMORY)
        self.interval = FIRST_PAUSE
        self.pause = 0
        self.is_probing = False


class AdaptiveDrafter:
    """A drafter that has another one guess, and decides for how many tokens.

    Args:
        source: guesses.
        num_tokens: drafts of a sequence in a step at most.

    Attributes:
        step_costs: what a step takes in which every running sequence has 0, 1, 2, ... drafts, beside the first of them.
        is_measuring: True where no sequence is to have drafts, so that a step without them can be measured.
    """

    def __init__(self, source: Drafter, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.step_costs: Seq[float] = [1.0 + FIRST_ROW_COST * k for k in range(num_tokens + 1)]
        self.is_measuring = False
        self._source: Drafter | None = source
        self._records: dict[int, _Record] = {}
        # At first drafts are believed in, enough to be tried.
        self._common = AcceptanceRate(COMMON_MEMORY, 1.0, 1.0)

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        """See `Drafter`."""
        if self._source is None or self.is_measuring or sequence.request.params.speculative is False:
            return ()
        record = self._records.get(sequence.seq_id)
        if record is None:
            record = self._records[sequence.seq_id] = _Record()
        if record.pause:
            record.pause -= 1
            return ()
        depth = best_depth(record.hits.share(self._common.share(0.0, 0.0), PRIOR_DRAFTS), self.step_costs)
        record.is_probing = depth == 0
        limit = min(limit, max(depth, 1))
        return tuple(self._call("propose", sequence, limit) or ())[:limit]

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """See `Drafter`."""
        num_wrong = int(num_accepted < num_drafted)
        self._common.add(num_accepted, num_wrong)
        record = self._records.get(sequence.seq_id)
        if record is not None:
            record.hits.add(num_accepted, num_wrong)
            if num_accepted:
                record.interval = FIRST_PAUSE
            elif record.is_probing:
                record.pause = record.interval
                record.interval = min(2 * record.interval, LONGEST_PAUSE)
        self._call("record", sequence, num_drafted, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._records.pop(sequence.seq_id, None)
        self._call("forget", sequence)

    def reset(self) -> None:
        """See `Drafter`."""
        self._call("reset")

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the drafter; None where it raises, or has raised before."""
        if self._source is None:
            return None
        try:
            return getattr(self._source, method)(*args)
        except Exception:
            logger.exception("%s failed; no more drafts are made", type(self._source).__name__)
            self._source = None
            return None


def best_depth(share: float, step_costs: Seq[float]) -> int:
    """Return how many drafts give the most tokens for what the step costs; 0 where none pay.

    Args:
        share: of drafts that are right, of those before which all were.
        step_costs: see `AdaptiveDrafter`.
    """
    best, most = 0, MARGIN
    expected = reached = 1.0
    for depth in range(1, len(step_costs)):
        reached *= share
        expected += reached
        if expected > most * step_costs[depth]:
            best, most = depth, expected / step_costs[depth]
    return best
