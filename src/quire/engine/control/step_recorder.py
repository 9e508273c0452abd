"""Records the duration of each step for the components that adapt to it: swapping, chunk sizes, speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.engine.control.chunk_size import ChunkSizeController
from quire.engine.control.draft_costs import DraftCosts
from quire.scheduling.decode_columns import DecodeItems
from quire.scheduling.plan import ScheduledSequence
from quire.scheduling.scheduler import Scheduler
from quire.sequences.decoding.speculation import AdaptiveDrafter

# Time constant of the prefill rate: a step's weight decays to about 1/e over this number of later prefill tokens.
RATE_MEMORY_TOKENS = 20_000


class StepRecorder:
    """Takes the scheduled sequences and the duration of each step, and updates the scheduler's settings.

    It maintains `scheduler.preemption.rates` (recompute or swap), `scheduler.chunk_tokens` (inter-token latency) and
    the draft costs of `speculation`.

    Attributes:
        tokens_per_s: prefill rate; None before the first measurement.
        chunk_size: controller of the chunk size; None without a target for the inter-token latency.
        decoding_step_s: duration of the last step, in seconds; None if no sequence decoded in it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        copy_bytes_per_s: float | None,
        max_inter_token_ms: float | None,
        speculation: AdaptiveDrafter | None,
    ) -> None:
        self.tokens_per_s: float | None = None
        self.decoding_step_s: float | None = None
        self.speculation = speculation
        self._scheduler = scheduler
        self._prefill_tokens = self._prefill_s = 0.0
        self._draft_costs = None if speculation is None else DraftCosts(len(speculation.step_costs) - 1)
        self._num_decoding = 0
        self.chunk_size = None if max_inter_token_ms is None else ChunkSizeController(max_inter_token_ms / 1000)
        if self.chunk_size is not None:
            scheduler.chunk_tokens = self.chunk_size.chunk_tokens
        if copy_bytes_per_s is not None:
            scheduler.preemption.rates = replace(scheduler.preemption.rates, copy_bytes_per_s=copy_bytes_per_s)

    def record_step(self, items: Sequence[ScheduledSequence], elapsed_s: float, *, overlaps: bool = False) -> int:
        """Record a step; return its number of tokens, including drafts."""
        is_decode, num_seqs = isinstance(items, DecodeItems), len(items)
        num_drafts = 0 if is_decode else sum([item.num_draft for item in items])
        # Drafts are not tokens of a prompt.
        counts = [1] * num_seqs if is_decode else [len(item.token_ids) - item.num_draft for item in items]
        num_tokens = sum(counts)
        if num_tokens == num_seqs:
            self._record_decode(num_seqs, num_drafts, None if overlaps else elapsed_s)
        self.record_prefill(num_tokens, num_seqs, elapsed_s)
        self.decoding_step_s = elapsed_s if 1 in counts else None
        if self.chunk_size is not None:
            num_decoding = counts.count(1)
            self.chunk_size.record_step(num_decoding, num_tokens - num_decoding, elapsed_s)
            self._scheduler.chunk_tokens = self.chunk_size.chunk_tokens
        return num_tokens + num_drafts

    def record_prefill(self, num_tokens: int, num_seqs: int, elapsed_s: float) -> None:
        """Update the prefill rate, except after a mostly decoding step (fewer than two tokens per sequence)."""
        if num_tokens < 2 * num_seqs or elapsed_s <= 0:
            return
        decay = RATE_MEMORY_TOKENS / (RATE_MEMORY_TOKENS + num_tokens)
        self._prefill_tokens = self._prefill_tokens * decay + num_tokens
        self._prefill_s = self._prefill_s * decay + elapsed_s
        self.tokens_per_s = self._prefill_tokens / self._prefill_s
        preemption = self._scheduler.preemption
        preemption.rates = replace(preemption.rates, prefill_tokens_per_s=self.tokens_per_s)

    def _record_decode(self, num_seqs: int, num_drafts: int, elapsed_s: float | None) -> None:
        """Update the draft costs after a step that only decoded; see `DraftCosts.record_step`."""
        if self.speculation is None or self._draft_costs is None:
            return
        self._draft_costs.record_step(num_seqs, num_drafts, elapsed_s)
        self.speculation.is_measuring = self._draft_costs.needs_baseline
        # Without drafts and with the same number of sequences, the costs by depth are unchanged.
        if num_drafts or num_seqs != self._num_decoding:
            self._num_decoding = num_seqs
            self.speculation.step_costs = self._draft_costs.by_depth(num_seqs)
