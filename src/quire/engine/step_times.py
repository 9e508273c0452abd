"""Tells those who plan by what steps take how long each of them took."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.calibration import Calibration
from quire.engine.drafting import DraftPacer
from quire.engine.pace import Pace
from quire.scheduling.plan import PlanItem
from quire.scheduling.scheduler import Scheduler


class StepTimes:
    """Hands on what steps take: to preemption, to the size of chunks, to the number of drafts.

    Args:
        scheduler: the engine's.
        copy_bytes_per_s: that move between the tiers, None without a host tier.
        max_inter_token_ms: what running sequences may wait for a token, None for any time.
        draft_pacer: None where nobody guesses tokens.

    Attributes:
        calibration: what preemption and staging reckon with.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        copy_bytes_per_s: float | None,
        max_inter_token_ms: float | None,
        draft_pacer: DraftPacer | None,
    ) -> None:
        self._scheduler = scheduler
        self.calibration = Calibration(copy_bytes_per_s)
        self.draft_pacer = draft_pacer
        self._pace = None if max_inter_token_ms is None else Pace(max_inter_token_ms / 1000)
        self._set_chunk()

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that are computed in a second; None before that was measured."""
        return self.calibration.tokens_per_s

    def note_step(self, items: Sequence[PlanItem], elapsed_s: float) -> int:
        """Take in how long a step took; return the tokens that it computed, drafts included."""
        # Drafts are no tokens of a prompt.
        counts = [len(item.token_ids) - item.num_draft for item in items]
        num_certain = sum(counts)
        if self.draft_pacer is not None:
            self.draft_pacer.note_step(items, elapsed_s)
        self.calibration.note_step(num_certain, len(counts), elapsed_s)
        if self._pace is not None:
            num_decoding = counts.count(1)
            self._pace.note_step(num_decoding, num_certain - num_decoding, elapsed_s)
            self._set_chunk()
        self._scheduler.preemption.costs = self.calibration.costs
        return num_certain + sum(item.num_draft for item in items)

    def _set_chunk(self) -> None:
        if self._pace is not None:
            self._scheduler.chunk_tokens = self._pace.chunk_tokens
