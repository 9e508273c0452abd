"""A model runner that replays captured decode steps, and runs all others as they come."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from quire.execution.graph_ladder import GraphLadder
from quire.execution.runner import ModelRunner
from quire.execution.sampling.beam_sampling import sample_apart
from quire.scheduling.plan import BeamGroup, Candidate, ItemResult, ScheduledSequence, StepPlan, StepResult

logger = logging.getLogger(__name__)


class GraphRunner(ModelRunner):
    """Replays steps in which every sequence has one token, all of them known ones; see `ModelRunner`.

    Attributes:
        ladder: captured steps; None runs every step as it comes.
        num_replayed: number of steps that were replayed.
    """

    ladder: GraphLadder | None = None
    num_replayed: int = 0
    _replayed: tuple[Tensor, Tensor] | None = None

    def _run(self, plan: StepPlan) -> StepResult:
        ladder, items = self.ladder, plan.items
        if ladder is None or not items or not self._can_replay(items) or not ladder.takes(items):
            return super()._run(plan)
        if plan.ops.copies:
            self._blocks.apply(plan.ops.copies, plan.ops.saves)
        if plan.finished_ids:
            self._embeddings.apply_plan(plan)
            self._pooler.apply_plan(plan)
            self._adapters.apply_plan(plan)
        self._builder.apply_plan(plan)
        self._sampler.begin_step(plan)
        hidden, logits = ladder.run(items, self._builder)
        self.num_replayed += 1
        if self._decoder.is_follower:
            self._decoder.serve_head()
            return StepResult(plan.tick, ())
        self._replayed = (hidden, logits) if self._decoder.ranks is None else None
        try:
            results, found = self._sample(items, plan.beams, hidden)
        finally:
            self._replayed = None
        return StepResult(plan.tick, tuple(results), found)

    def _can_replay(self, items: Sequence[ScheduledSequence]) -> bool:
        """Say whether items are decodes of known sequences that need nothing but the model."""
        _, _, token_ids, _, num_samples, new_sequences, _ = zip(*items, strict=True)
        if new_sequences.count(None) < len(items) or not all(num_samples) or max(map(len, token_ids)) > 1:
            return False
        others = (self._embeddings.by_sequence, self._pooler.by_sequence, self._adapters.by_sequence)
        if any(others) and any(item.seq_id in known for known in others for item in items):
            return False
        return not self._sampler.measures_prompts(items)

    def _draw(
        self, sampled: Sequence[ScheduledSequence], hidden: Tensor, beams: Sequence[BeamGroup]
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Draw from the logits that were replayed, if `hidden` was."""
        if self._replayed is None or beams:
            return super()._draw(sampled, hidden, beams)
        try:
            return self._sampler.sample(self._replayed[1], sampled), ()
        except Exception:
            logger.exception("sampling %d sequences at once failed; each is sampled by itself", len(sampled))
            return sample_apart(self._sampler, lambda rows: self._decoder.logits(hidden[rows]), sampled, beams)
