"""Adaptive number of drafts, chosen by their acceptance rate and by the measured cost of verifying them.

A step with `k` drafts gives `1 + a + a^2 + ... + a^k` tokens, where `a` is the probability that a draft is accepted
after all drafts before it were. The engine measures how much longer such a step takes than one without drafts. The best
`k` has the maximum ratio of expected tokens to time; it is 0 if no ratio is above `MARGIN`. Then a single draft is
tried from time to time, and after a rejected one the sequence pauses for a number of tokens that is known in advance.

Outputs do not depend on drafts. So a drafter that raises is disabled, and sequences continue without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from math import inf
from typing import Any

from quire.sequences.decoding.drafting import Drafter, ModelDrafter
from quire.sequences.sequence import Sequence

logger = logging.getLogger(__name__)

# Initial estimate of the cost of a draft, relative to a step without drafts.
FIRST_ROW_COST = 0.08
# Minimum ratio of expected tokens to cost; above 1, since both are estimates.
MARGIN = 1.03
# Decay of a draft's weight with each later draft, for one sequence and for all sequences together.
MEMORY = 0.9
OVERALL_MEMORY = 0.98
# Weight of the overall rate in a sequence's rate, in drafts.
PRIOR_DRAFTS = 2.0
# Number of tokens until a draft is tried again if drafts do not pay; doubled after each rejected one.
FIRST_PAUSE = 16
LONGEST_PAUSE = 256


class AcceptanceRate:
    """Acceptance rate of drafts as an exponentially weighted average."""

    __slots__ = ("memory", "num_right", "num_wrong")

    def __init__(self, memory: float, num_right: float = 0.0, num_wrong: float = 0.0) -> None:
        self.memory = memory
        self.num_right = num_right
        self.num_wrong = num_wrong

    def add(self, num_right: int, num_wrong: int) -> None:
        """Add the result of a verification; drafts after the first rejected one do not count."""
        decay = self.memory ** (num_right + num_wrong)
        self.num_right = self.num_right * decay + num_right
        self.num_wrong = self.num_wrong * decay + num_wrong

    def share(self, prior: float, weight: float) -> float:
        """Return the rate, smoothed with `weight` more drafts with an acceptance rate of `prior`."""
        return (self.num_right + prior * weight) / (self.num_right + self.num_wrong + weight)


class _Record:
    """Acceptance rate of a live sequence's drafts, and the number of tokens below which none are tried."""

    __slots__ = ("acceptance", "interval", "is_probing", "resumes_at")

    def __init__(self) -> None:
        self.acceptance = AcceptanceRate(MEMORY)
        self.interval = FIRST_PAUSE
        self.resumes_at = 0
        self.is_probing = False


class AdaptiveDrafter:
    """Drafter that chooses the number of drafts for another drafter.

    Args:
        source: drafter that proposes the tokens.
        num_tokens: maximum number of drafts of a sequence in a step.

    Attributes:
        step_costs: relative times of a step in which every running sequence has 0, 1, 2, ... drafts; the first is 1.
        is_measuring: True while no sequence gets drafts, so that a step without them can be measured.
        is_model: True if the data plane makes the drafts, with a draft model.
    """

    def __init__(self, source: Drafter, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.step_costs: Seq[float] = [1.0 + FIRST_ROW_COST * k for k in range(num_tokens + 1)]
        self.is_measuring = False
        self.is_model = isinstance(source, ModelDrafter)
        self._source: Drafter | None = source
        self._records: dict[int, _Record] = {}
        # The initial rate is high enough for drafts to be tried.
        self._overall = AcceptanceRate(OVERALL_MEMORY, 1.0, 1.0)

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        """See `Drafter`."""
        if self._source is None or self.is_measuring or sequence.request.params.speculative is False:
            return ()
        record = self._records.get(sequence.seq_id)
        if record is None:
            record = self._records[sequence.seq_id] = _Record()
        if len(sequence.tokens) < record.resumes_at:
            return ()
        depth = best_depth(self._share_of(record), self.step_costs)
        record.is_probing = depth == 0
        limit = min(limit, max(depth, 1))
        return tuple(self._call("propose", sequence, limit) or ())[:limit]

    def _share_of(self, record: _Record) -> float:
        """Return the estimated acceptance rate of a sequence's drafts."""
        return record.acceptance.share(self._overall.share(0.0, 0.0), PRIOR_DRAFTS)

    def resumes_at(self, sequence: Sequence) -> float:
        """Return the number of tokens below which a sequence gets no drafts, independently of its tokens."""
        if self._source is None or sequence.request.params.speculative is False:
            return inf
        record = self._records.get(sequence.seq_id)
        return 0 if record is None else record.resumes_at

    def is_probing(self, sequence: Sequence) -> bool:
        """Return whether drafts did not pay at the last `propose` for a sequence, so that it tries a single draft."""
        record = self._records.get(sequence.seq_id)
        return record is not None and record.is_probing

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """See `Drafter`; the tokens of the step are already appended."""
        num_wrong = int(num_accepted < num_drafted)
        self._overall.add(num_accepted, num_wrong)
        record = self._records.get(sequence.seq_id)
        if record is not None:
            record.acceptance.add(num_accepted, num_wrong)
            if num_accepted:
                record.interval = FIRST_PAUSE
            elif record.is_probing:
                record.resumes_at = len(sequence.tokens) + record.interval
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
        """Call a method of the source; return None if it raises, or has raised before."""
        if self._source is None:
            return None
        try:
            return getattr(self._source, method)(*args)
        except Exception:
            logger.exception("%s failed; no more drafts are made", type(self._source).__name__)
            self._source = None
            return None


def best_depth(share: float, step_costs: Seq[float]) -> int:
    """Return the number of drafts with the most expected tokens per cost of the step; 0 if drafts do not pay."""
    best, most = 0, MARGIN
    expected = reached = 1.0
    for depth in range(1, len(step_costs)):
        reached *= share
        expected += reached
        if expected > most * step_costs[depth]:
            best, most = depth, expected / step_costs[depth]
    return best
