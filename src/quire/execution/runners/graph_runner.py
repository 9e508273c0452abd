"""A model runner that replays captured steps: of few tokens per sequence as a whole, others in pieces; or is eager."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from quire.execution.capture.decode_rows import few_rows_of
from quire.execution.capture.graph_ladder import GraphLadder, ReplayedStep
from quire.execution.capture.piecewise_ladder import PiecewiseLadder
from quire.execution.runners.runner import ModelRunner
from quire.execution.sampling.beam_sampling import sample_apart
from quire.execution.sampling.device.device_sampler import DeviceSampler
from quire.execution.step.batch import end_rows
from quire.execution.step.pinned import placed
from quire.ops.interface.static_steps import vector
from quire.scheduling.decode_columns import DecodeItems
from quire.scheduling.plan import BeamGroup, Candidate, ItemResult, ScheduledSequence, StepPlan, StepResult

logger = logging.getLogger(__name__)


class GraphRunner(ModelRunner):
    """Replays steps in which every sequence is known and has few tokens: decodes, and drafts to verify.

    See `ModelRunner`. Of other steps, such as those with prompts, it replays the pieces between attention.
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
        is_taken = self.draft is None and self._can_replay(items) and ladder.takes(items)
        adapted = self._adapters.rows_of_decodes(items) if is_taken and self._adapters.by_sequence else None
        if not is_taken or (adapted is not None and not ladder.takes_adapters(adapted)):
            ladder.forget_rows()
            try:
                return super()._run(plan)
            finally:
                self._replayed = None
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

    def _can_replay(self, items: Sequence[ScheduledSequence], *, has_few: bool = False) -> bool:
        """Say whether items are of known sequences, sample tokens, and need nothing but the model and adapters."""
        if not items:
            return False
        if not isinstance(items, DecodeItems):
            _, _, token_ids, _, num_samples, new_sequences, _ = zip(*items, strict=True)
            is_known = new_sequences.count(None) == len(items)
            # The runner has opened new sequences with few tokens; those from the first token on are prompts.
            if not is_known and not (has_few and all(item.new_sequence is None or item.start for item in items)):
                return False
            if not all(num_samples):
                return False
            if max(map(len, token_ids)) > 1 and not has_few:
                return False
        others = (self._embeddings.by_sequence, self._pooler.by_sequence)
        if any(others) and any(item.seq_id in known for known in others for item in items):
            return False
        return not self._sampler.measures_prompts(items)

    def _replay_few(self, items: Sequence[ScheduledSequence]) -> ReplayedStep | None:
        """Replay a captured step for items with few tokens; return None where no captured step takes them."""
        ladder = self.ladder
        found = few_rows_of(items) if ladder is not None and self._can_replay(items, has_few=True) else None
        if ladder is None or found is None:
            return None
        rows, counts = found
        adapted = self._adapters.rows_of_decodes(rows) if self._adapters.by_sequence else None
        if not ladder.takes(rows) or (adapted is not None and not ladder.takes_adapters(adapted)):
            return None
        self.num_replayed += 1
        return ladder.run(rows, self._builder, adapted, counts)

    def _compute(self, items: Sequence[ScheduledSequence], counts: Sequence[int] | None, given: Any) -> Tensor:
        """Compute as `ModelRunner` does, by a captured step or captured pieces where these take the items."""
        step = self._replay_few(items) if given is None else None
        if step is not None:
            return self._take_rows(step, items, reads_all=counts is None)
        pieces, adapted = self.pieces, self._adapters.by_sequence
        is_adapted = bool(adapted) and any(item.seq_id in adapted for item in items)
        num_rows = sum(len(item.token_ids) for item in items)
        if pieces is None or given is not None or is_adapted or not pieces.takes(num_rows):
            return super()._compute(items, counts, given)
        self.num_replayed_in_pieces += 1
        hidden = pieces.run(self._builder.lay_out(items, self._groups))
        if counts is None:
            return hidden
        rows = placed(vector(end_rows(items, counts)), hidden.device)
        return hidden.index_select(0, rows)

    def _take_rows(self, step: ReplayedStep, items: Sequence[ScheduledSequence], *, reads_all: bool) -> Tensor:
        """Keep a replayed step's rows to sample from; return its hidden states, of all rows or of those rows."""
        counts = [1 + item.num_draft for item in items]
        drawn = step
        if sum(counts) < len(step.hidden):
            rows = placed(vector(end_rows(items, counts)), step.hidden.device)
            drawn = ReplayedStep(*(numbers.index_select(0, rows) for numbers in step))
        self._replayed = drawn if self._decoder.ranks is None else None
        return step.hidden if reads_all else drawn.hidden

    def _draw(
        self, sampled: Sequence[ScheduledSequence], hidden: Tensor, beams: Sequence[BeamGroup]
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Sample from the replayed step's logits, if `hidden` is of a replayed step."""
        if self._replayed is None or beams:
            return super()._draw(sampled, hidden, beams)
        try:
            # Where steps are captured, the sampler is a `DeviceSampler`.
            sampler, step = cast(DeviceSampler, self._sampler), self._replayed
            return sampler.sample(step.outputs, sampled, step.next_positions), ()
        except Exception:
            logger.exception("sampling %d sequences at once failed; each is sampled by itself", len(sampled))
            return sample_apart(self._sampler, lambda rows: self._decoder.logits(hidden[rows]), sampled, beams)
