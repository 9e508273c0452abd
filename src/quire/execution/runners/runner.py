"""The model runner, which executes one plan at a time on one device, and the executor of the same process."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import torch

from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.errors import WorkerError
from quire.execution.capture.captured_steps import CapturedSteps
from quire.execution.capture.graph_ladder import ReplayedStep
from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.drafts.draft_model import DraftModel, with_drafts
from quire.execution.drafts.mtp_drafter import MTPDrafter
from quire.execution.runners.executor import Runner
from quire.execution.sampling.beam_sampling import sample_apart, sample_beams
from quire.execution.sampling.prompt_logprobs import with_prompt_logprobs
from quire.execution.sampling.sampler import Sampler
from quire.execution.step.adapter_rows import AdapterRows
from quire.execution.step.batch import BatchBuilder, end_rows
from quire.execution.step.block_copies import BlockCopier
from quire.execution.step.device_health import step_error
from quire.execution.step.embeddings import MultimodalEmbeddings
from quire.execution.step.kv_storage import Storage
from quire.execution.step.pinned import select_rows
from quire.execution.step.pooling import Pooler
from quire.memory.results import MemoryOps
from quire.models.modules.causal_model import CausalModel
from quire.platform.prefault import Prefaulter
from quire.scheduling.decode_columns import DecodeItems, row_starts_of
from quire.scheduling.plan import (
    BeamGroup,
    Candidate,
    ItemResult,
    LaunchedStep,
    ScheduledSequence,
    StepPlan,
    StepResult,
)

logger = logging.getLogger(__name__)

_NEW_SEQUENCE: Final = attrgetter("new_sequence")


class ModelRunner:
    """Turns a plan into a result: bytes are moved, the model runs, tokens are drawn.

    It makes no decisions. Its only state of a sequence is the data from plans, until a plan closes the sequence.

    Args:
        decoder: the model.
        storages: memory of each cache group, the groups of the draft model or MTP head last.
        builder: turns a plan into the models' inputs.
        sampler: turns logits into tokens.
        media: embeddings that come with prompts.
        host_bytes: number of bytes of the host tier; 0 for none.
        disk: the disk tier; None for none.
        draft: draft model, or MTP head of the model; None for neither.
        prefaulter: touches the memory's pages before they are used; None for none.
        captured: captured steps of the model, which are tried first; None for none.
    """

    def __init__(
        self,
        decoder: CausalModel,
        storages: Sequence[Storage],
        builder: BatchBuilder,
        sampler: Sampler,
        media: MultimodalEmbeddings,
        host_bytes: int = 0,
        disk: DiskBlocks | None = None,
        draft: DraftModel | MTPDrafter | None = None,
        prefaulter: Prefaulter | None = None,
        captured: CapturedSteps | None = None,
    ) -> None:
        num_own = len(decoder.cache_groups)
        self._decoder, self.draft, self.captured = decoder, draft, captured
        self._ranks, self._is_follower = decoder.ranks, decoder.is_follower
        self._groups = range(num_own)
        self._storages = tuple(storages[:num_own])
        self._blocks = BlockCopier(storages, host_bytes, disk)
        self._builder, self._sampler = builder, sampler
        self._pooler = Pooler(decoder)
        self._adapters = AdapterRows()
        self._embeddings = media
        # See `keep_extras`.
        self._extras: dict[str, dict[int, Any]] = {
            "media": media.by_sequence,
            "pooling": self._pooler.by_sequence,
            "adapter": self._adapters.by_sequence,
        }
        self._prefaulter = prefaulter

    def measure_copies(self) -> float | None:
        """Return the bytes that move between the tiers in a second, None without a host tier; before the first plan."""
        return self._blocks.measure_copies()

    @torch.inference_mode()
    def move(self, ops: MemoryOps) -> None:
        """Move blocks without a step; wait for the disk if its queue is full."""
        self._blocks.apply(ops.copies, ops.saves, wait=True)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Args:
            plan: plan with at least one item; after its deltas the block tables hold slots for all its tokens.

        Returns:
            One result for each item, in the plan's order, and the candidates of each group of beams.
        """
        use = self._builder.use
        use.num_steps += 1
        use.is_stepping = True
        try:
            return self._run(plan)
        finally:
            use.is_stepping = False

    def _run(self, plan: StepPlan) -> StepResult:
        items: Sequence[ScheduledSequence] = plan.items
        if plan.ops.copies:
            self._blocks.apply(plan.ops.copies, plan.ops.saves)
        is_opening = not isinstance(items, DecodeItems) and any(map(_NEW_SEQUENCE, items))
        if plan.finished_ids or is_opening:
            keep_extras(self._extras, plan.finished_ids, items if is_opening else ())
            for seq_id in plan.finished_ids:
                self._pooler.pools.pop(seq_id, None)
        self._builder.apply_plan(plan)
        drafts = None if self.draft is None else self.draft.guess(items)
        if drafts is not None and self._sampler.masks_drafts(items):
            items = drafts.read(items)
        self._sampler.begin_step(plan if items is plan.items else plan._replace(items=tuple(items)))
        given = self._embeddings.rows(plan.items, row_starts_of(items)) if self._embeddings.by_sequence else None
        is_measured = self._sampler.measures_prompts(items)  # then every row is read, else sampled rows
        reads_all = is_measured or isinstance(self.draft, MTPDrafter)
        if self._pooler.by_sequence:
            reads_all |= self._pooler.reads_all(items)
        if isinstance(items, DecodeItems):
            counts = [1] * len(items.seq_ids)
        else:
            counts = [item.num_draft + 1 if item.num_samples else 0 for item in items]
        step = None if is_measured else self._replay(items)
        if step is None:
            # Decodes have no other rows than their last ones.
            hidden = self._compute(items, None if reads_all or isinstance(items, DecodeItems) else counts, given)
        else:
            hidden = step.hidden
            if sum(counts) < len(hidden):
                step = step.select(end_rows(items, counts))
        if drafts is not None:  # a GPU computes meanwhile
            items = drafts.read(items)
        if isinstance(self.draft, MTPDrafter):
            self.draft.follow(items, hidden, given)
        if self._is_follower:
            self._decoder.serve_head()
            return StepResult(plan.tick, ())
        if self._pooler.by_sequence:
            self._pooler.add_rows(items, row_starts_of(items), hidden)
        if step is not None:
            sampled = step.hidden
        else:
            sampled = select_rows(hidden, end_rows(items, counts)) if reads_all else hidden
        results, found = self._sample(items, counts, plan.beams, sampled, step)
        if is_measured:
            results = [
                with_prompt_logprobs(result, self._sampler.prompt_targets(item), hidden[start:], self._decoder)
                for result, item, start in zip(results, items, row_starts_of(items), strict=False)
            ]
        if self.draft is not None:
            results = with_drafts(results, plan.items, items)
        return StepResult(plan.tick, tuple(results), found)

    def _replay(self, items: Sequence[ScheduledSequence]) -> ReplayedStep | None:
        """Replay a captured step, if there is one for the items, and they have no embeddings and are not pooled."""
        if self.captured is None:
            return None
        others = self._embeddings.by_sequence, self._pooler.by_sequence
        if any(others) and any(item.seq_id in known for known in others for item in items):
            return None
        return self.captured.replay(items, self._builder, self._adapters)

    def _compute(self, items: Sequence[ScheduledSequence], counts: Sequence[int] | None, given: Any) -> torch.Tensor:
        """Return the hidden states of the last rows of items, `counts` of each; of all rows if it is None."""
        adapters, groups = self._adapters, self._groups
        if self.captured is not None:
            self.captured.forget_rows()
            hidden = None if given is not None else self.captured.replay_pieces(items, self._builder, adapters, groups)
            if hidden is not None:
                return hidden if counts is None else select_rows(hidden, end_rows(items, counts))
        batch = self._builder.lay_out(items, groups)
        read = None if counts is None else self._builder.lay_out_ends(items, counts, groups)
        adapted = adapters.rows(items, None if read is None else counts) if adapters.by_sequence else None
        return self._decoder(batch.input_ids, batch.positions, batch.groups, self._storages, given, read, adapted)

    def _sample(
        self,
        items: Sequence[ScheduledSequence],
        counts: Sequence[int],
        beams: Sequence[BeamGroup],
        hidden: torch.Tensor,
        step: ReplayedStep | None,
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Draw the tokens of all items."""
        sampled = items if all(counts) else [item for item in items if item.num_samples]
        known: dict[int, ItemResult] = {}
        if self._pooler.by_sequence:
            sampled, hidden, known = self._pooler.take(sampled, hidden)
        found: tuple[tuple[Candidate, ...], ...] = ()
        if not sampled:
            return [known.get(item.seq_id) or ItemResult(item.seq_id, ()) for item in items], found
        drawn = None if beams or self._ranks is None else self._draw_likeliest(sampled, hidden)
        if drawn is None:
            drawn, found = self._draw(sampled, hidden, beams, step)
        if sampled is items:
            return drawn, found
        known |= {result.seq_id: result for result in drawn}
        return [known.get(item.seq_id) or ItemResult(item.seq_id, ()) for item in items], found

    def _draw_likeliest(self, sampled: Sequence[ScheduledSequence], hidden: torch.Tensor) -> list[ItemResult] | None:
        """Return greedy results from the ranks' parts of the logits; None if that is not possible for the items."""
        found = self._decoder.likeliest(hidden) if self._sampler.is_greedy(sampled) else None
        return None if found is None else self._sampler.take_likeliest(*found, sampled)

    def _draw(
        self,
        sampled: Sequence[ScheduledSequence],
        hidden: torch.Tensor,
        beams: Sequence[BeamGroup],
        step: ReplayedStep | None,
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Draw from the logits of a replayed step, or of `hidden`; see `_sample`."""
        if step is not None and not beams and self._ranks is None:
            logits, positions = step.outputs, step.next_positions
        else:
            logits, positions = self._decoder.logits(hidden), None
        try:
            if beams:
                return sample_beams(self._sampler, logits, sampled, beams)
            return self._sampler.sample(logits, sampled, positions), ()
        except Exception:
            logger.exception("sampling %d sequences at once failed; each is sampled by itself", len(sampled))
        del logits  # memory may have run out, and the error held the logits until here
        return sample_apart(self._sampler, lambda rows: self._decoder.logits(hidden[rows]), sampled, beams)


def keep_extras(
    extras: Mapping[str, dict[int, Any]], finished_ids: Sequence[int], items: Sequence[ScheduledSequence]
) -> None:
    """Drop the extras of finished sequences, and keep those of new ones.

    Args:
        extras: values of fields of `NewSequence` that most sequences lack, by the field's name and the sequence.
        finished_ids: sequences that have finished, before `items` are opened.
        items: items that may open sequences.
    """
    for by_sequence in extras.values():
        for seq_id in finished_ids:
            by_sequence.pop(seq_id, None)
    for item in items:
        if item.new_sequence is not None:
            for name, by_sequence in extras.items():
                extra = getattr(item.new_sequence, name)
                if extra is not None and extra != ():
                    by_sequence[item.seq_id] = extra


class InProcessExecutor:
    """Runs every step in the caller's process and thread, which does not wait for deferred tokens.

    Args:
        runner: runner of the model, which executes plans.
        deferred: tokens of steps that are not read yet; None for a runner that returns all tokens with their step.
    """

    def __init__(self, runner: Runner, deferred: DeferredTokens | None = None) -> None:
        self._runner: Runner | None = runner
        self._deferred = deferred

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step; see `Executor`."""
        deferred = self._deferred
        if deferred is not None:
            deferred.begin_step()
        try:
            launched = self._execute(plan)
        except WorkerError as error:
            _clear_frames(error)
            return LaunchedStep.failed(error)
        if deferred is None:
            return LaunchedStep(lambda: launched)
        return LaunchedStep(deferred.reader_of(launched))

    def _execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        if self._runner is None:
            raise WorkerError(f"step {plan.tick} cannot run: the executor is closed")
        try:
            return self._runner.execute(plan)
        except Exception as error:
            raise step_error(f"step {plan.tick} failed in the data plane", error) from error

    def measure_copies(self) -> float | None:
        """See `Executor`."""
        return None if self._runner is None else self._runner.measure_copies()

    def move(self, ops: MemoryOps) -> None:
        """Move blocks without a step.

        Raises:
            WorkerError: they failed.
        """
        try:
            if self._runner is not None:
                self._runner.move(ops)
        except Exception as error:
            raise step_error("blocks could not be moved", error) from error

    def close(self) -> None:
        """Drop the runner, and with it the weights and the KV memory."""
        self._runner = None


def _clear_frames(error: BaseException | None) -> None:
    """Release the tensors of failed calls: the frames of a stored error would keep a step's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
