"""A model runner that replays captured steps, of decodes as a whole and others in pieces, and runs the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from quire.execution.batch import Batch, end_rows
from quire.execution.graph_ladder import GraphLadder, ReplayedStep
from quire.execution.piecewise_ladder import PiecewiseLadder
from quire.execution.pinned import placed
from quire.execution.runner import ModelRunner
from quire.execution.sampling.beam_sampling import sample_apart
from quire.execution.sampling.device_sampler import DeviceSampler
from quire.ops.static_steps import vector
from quire.scheduling.decode_columns import DecodeItems
from quire.scheduling.plan import BeamGroup, Candidate, ItemResult, ScheduledSequence, StepPlan, StepResult

logger = logging.getLogger(__name__)


class GraphRunner(ModelRunner):
    """Replays steps in which every sequence has one token, all of them known ones; see `ModelRunner`.

    Of other steps, such as those with prompts, it replays the pieces between attention.

    Attributes:
        ladder: captured steps of decodes; None for none.
        pieces: captured pieces of other steps; None for none.
        num_replayed: number of decode steps that were replayed.
        num_replayed_in_pieces: number of other steps that were.
    """

    ladder: GraphLadder | None = None
    pieces: PiecewiseLadder | None = None
    num_replayed: int = 0
    num_replayed_in_pieces: int = 0
    _replayed: ReplayedStep | None = None

    def _run(self, plan: StepPlan) -> StepResult:
        ladder, items = self.ladder, plan.items
        if ladder is None:
            return super()._run(plan)
        is_taken = bool(items) and self._can_replay(items) and ladder.takes(items)
        adapted = self._adapters.rows_of_decodes(items) if is_taken and self._adapters.by_sequence else None
        if not is_taken or (adapted is not None and not ladder.takes_adapters(adapted)):
            ladder.forget_rows()
            return super()._run(plan)
        if plan.ops.copies:
            self._blocks.apply(plan.ops.copies, plan.ops.saves)
        if plan.finished_ids:
            closing = plan._replace(items=())  # no sequence is new
            self._embeddings.apply_plan(closing)
            self._pooler.apply_plan(closing)
            self._adapters.apply_plan(closing)
        self._builder.apply_plan(plan)
        self._sampler.begin_step(plan)
        step = ladder.run(items, self._builder, adapted)
        self.num_replayed += 1
        if self._decoder.is_follower:
            self._decoder.serve_head()
            return StepResult(plan.tick, ())
        self._replayed = step if self._decoder.ranks is None else None
        try:
            if isinstance(items, DecodeItems) and self._replayed is not None:  # all are drawn, of logits that are there
                results, found = self._draw(items, step.hidden, ())
            else:
                results, found = self._sample(items, plan.beams, step.hidden)
        finally:
            self._replayed = None
        return StepResult(plan.tick, tuple(results), found)

    def _can_replay(self, items: Sequence[ScheduledSequence]) -> bool:
        """Say whether items are decodes of known sequences that need nothing but the model and adapters."""
        if not isinstance(items, DecodeItems):
            _, _, token_ids, _, num_samples, new_sequences, _ = zip(*items, strict=True)
            if new_sequences.count(None) < len(items) or not all(num_samples) or max(map(len, token_ids)) > 1:
                return False
        others = (self._embeddings.by_sequence, self._pooler.by_sequence)
        if any(others) and any(item.seq_id in known for known in others for item in items):
            return False
        return not self._sampler.measures_prompts(items)

    def _compute(
        self, items: Sequence[ScheduledSequence], batch: Batch, counts: Sequence[int] | None, given: Any
    ) -> Tensor:
        """See `ModelRunner`: rows of adapters have products of their own."""
        pieces, adapted = self.pieces, self._adapters.by_sequence
        is_adapted = bool(adapted) and any(item.seq_id in adapted for item in items)
        if pieces is None or given is not None or is_adapted or not pieces.takes(len(batch.input_ids)):
            return super()._compute(items, batch, counts, given)
        self.num_replayed_in_pieces += 1
        hidden = pieces.run(batch)
        if counts is None:
            return hidden
        rows = placed(vector(end_rows(items, counts)), hidden.device)
        return hidden.index_select(0, rows)

    def _draw(
        self, sampled: Sequence[ScheduledSequence], hidden: Tensor, beams: Sequence[BeamGroup]
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Draw from the logits that were replayed, if `hidden` was."""
        if self._replayed is None or beams:
            return super()._draw(sampled, hidden, beams)
        try:
            # Where steps are captured, the sampler is one for devices.
            sampler, step = cast(DeviceSampler, self._sampler), self._replayed
            return sampler.sample(step.logits, sampled, step.next_positions), ()
        except Exception:
            logger.exception("sampling %d sequences at once failed; each is sampled by itself", len(sampled))
            return sample_apart(self._sampler, lambda rows: self._decoder.logits(hidden[rows]), sampled, beams)
