"""The model runner, which obeys one plan at a time on one device, and the executor that calls it in its own process."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch

from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.errors import WorkerError
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
from quire.models.modules.decoder import Decoder
from quire.platform.prefault import Prefaulter
from quire.scheduling.decode_columns import DecodeResults, row_starts_of
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

# Fields of all results, without a Python call for each.
_ERROR: Final = attrgetter("error")
_PROMPT_LOGPROBS: Final = attrgetter("prompt_logprobs")
_DRAFT: Final = attrgetter("draft")


class ModelRunner:
    """Turns a plan into a result: bytes are moved, the model runs, tokens are drawn.

    It decides nothing, and keeps of a sequence only what its opening and later items said, until the plan closes it.

    Args:
        decoder: the model.
        storages: memory, one for each cache group, those of what makes drafts last.
        builder: turns a plan into the models' inputs.
        sampler: turns logits into tokens.
        media: has the embeddings that come with prompts.
        host_bytes: number of bytes of the host tier; 0 for none.
        disk: the tier below that, if there is one.
        draft: runs a second model that makes drafts, or the first one's MTP head; None for neither.
        prefaulter: touches the memory's pages before they are used; None for none.
    """

    def __init__(
        self,
        decoder: Decoder,
        storages: Sequence[Storage],
        builder: BatchBuilder,
        sampler: Sampler,
        media: MultimodalEmbeddings,
        host_bytes: int = 0,
        disk: DiskBlocks | None = None,
        draft: DraftModel | MTPDrafter | None = None,
        prefaulter: Prefaulter | None = None,
    ) -> None:
        num_own = len(decoder.cache_groups)
        self._decoder, self.draft = decoder, draft
        self._groups = range(num_own)
        self._storages = tuple(storages[:num_own])
        self._blocks = BlockCopier(storages, host_bytes, disk)
        self._builder, self._sampler = builder, sampler
        self._pooler = Pooler(decoder)
        self._adapters = AdapterRows()
        self._embeddings = media
        self._prefaulter = prefaulter

    def measure_copies(self) -> float | None:
        """Return the bytes that move between the tiers in a second, None without a host tier; before the first plan."""
        return self._blocks.measure_copies()

    @torch.inference_mode()
    def move(self, ops: MemoryOps) -> None:
        """Make movements without a step, and wait for the disk where they are too many for it."""
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
        if plan.ops.copies:
            self._blocks.apply(plan.ops.copies, plan.ops.saves)
        if plan.finished_ids or any(item.new_sequence is not None for item in plan.items):
            self._embeddings.apply_plan(plan)
            self._pooler.apply_plan(plan)
            self._adapters.apply_plan(plan)
        self._builder.apply_plan(plan)
        items: Sequence[ScheduledSequence] = plan.items
        drafts = None if self.draft is None else self.draft.guess(items)
        if drafts is not None and self._sampler.masks_drafts(items):
            items = drafts.read(items)
        self._sampler.begin_step(plan._replace(items=tuple(items)))
        given = self._embeddings.rows(plan.items, row_starts_of(items)) if self._embeddings.by_sequence else None
        counts = [item.num_draft + 1 if item.num_samples else 0 for item in items]
        is_measured = self._sampler.measures_prompts(items)  # then every row is read, else what is sampled
        reads_all = is_measured or isinstance(self.draft, MTPDrafter)
        if self._pooler.by_sequence:
            reads_all |= self._pooler.reads_all(items)
        hidden = self._compute(items, None if reads_all else counts, given)
        if drafts is not None:  # a GPU computes meanwhile
            items = drafts.read(items)
        if isinstance(self.draft, MTPDrafter):
            self.draft.follow(items, hidden, given)
        if self._decoder.is_follower:
            self._decoder.serve_head()
            return StepResult(plan.tick, ())
        if self._pooler.by_sequence:
            self._pooler.add_rows(items, row_starts_of(items), hidden)
        sampled = select_rows(hidden, end_rows(items, counts)) if reads_all else hidden
        results, found = self._sample(items, plan.beams, sampled)
        if is_measured:
            results = [
                with_prompt_logprobs(result, self._sampler.prompt_targets(item), hidden[start:], self._decoder)
                for result, item, start in zip(results, items, row_starts_of(items), strict=False)
            ]
        if self.draft is not None:
            results = with_drafts(results, plan.items, items)
        return StepResult(plan.tick, tuple(results), found)

    def _compute(self, items: Sequence[ScheduledSequence], counts: Sequence[int] | None, given: Any) -> torch.Tensor:
        """Return the hidden states of the last rows of items, `counts` of each; of all rows where it is None."""
        batch = self._builder.lay_out(items, self._groups)
        read = None if counts is None else self._builder.lay_out_ends(items, counts, self._groups)
        adapters = self._adapters.rows(items, None if read is None else counts) if self._adapters.by_sequence else None
        return self._decoder(batch.input_ids, batch.positions, batch.groups, self._storages, given, read, adapters)

    def _sample(
        self, items: Sequence[ScheduledSequence], beams: Sequence[BeamGroup], hidden: torch.Tensor
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Draw the tokens of all items from the hidden states of their last rows, [R, E].

        Of an item with drafts these are the rows of the drafts, and of the token before them.
        """
        sampled = [item for item in items if item.num_samples]
        known: dict[int, ItemResult] = {}
        if self._pooler.by_sequence:
            sampled, hidden, known = self._pooler.take(sampled, hidden)
        found: tuple[tuple[Candidate, ...], ...] = ()
        if not sampled:
            return [known.get(item.seq_id) or ItemResult(item.seq_id, ()) for item in items], found
        drawn = None if beams else self._draw_likeliest(sampled, hidden)
        if drawn is None:
            drawn, found = self._draw(sampled, hidden, beams)
        if len(sampled) == len(items):
            return drawn, found
        known |= {result.seq_id: result for result in drawn}
        return [known.get(item.seq_id) or ItemResult(item.seq_id, ()) for item in items], found

    def _draw_likeliest(self, sampled: Sequence[ScheduledSequence], hidden: torch.Tensor) -> list[ItemResult] | None:
        """Return the likeliest tokens where ranks find them in parts of the logits, and nothing else is asked for."""
        found = self._decoder.likeliest(hidden) if self._sampler.is_greedy(sampled) else None
        return None if found is None else self._sampler.take_likeliest(*found, sampled)

    def _draw(
        self, sampled: Sequence[ScheduledSequence], hidden: torch.Tensor, beams: Sequence[BeamGroup]
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Draw from the logits of `hidden`; see `_sample`."""
        logits = self._decoder.logits(hidden)
        try:
            if beams:
                return sample_beams(self._sampler, logits, sampled, beams)
            return self._sampler.sample(logits, sampled), ()
        except Exception:
            logger.exception("sampling %d sequences at once failed; each is sampled by itself", len(sampled))
        del logits  # it may have failed for want of memory, which the error kept until here
        return sample_apart(self._sampler, lambda rows: self._decoder.logits(hidden[rows]), sampled, beams)


class InProcessExecutor:
    """Runs every step in the caller's own process and thread, which waits for no token that stays on the device.

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
        if any(map(_ERROR, launched.items)):
            deferred.add_failed([item.seq_id for item in launched.items if item.error is not None])
        reads = deferred.take_reads()
        return LaunchedStep(lambda: _read(launched, reads))

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
        """Make movements without a step.

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


def _read(launched: StepResult, reads: Sequence[Callable[[], Sequence[ItemResult]]]) -> StepResult:
    """Wait for the tokens of a step, and return its result."""
    try:
        parts = [read() for read in reads]
    except Exception as error:
        raise step_error(f"step {launched.tick} failed in the data plane", error) from error
    if not parts:
        return launched
    is_whole = len(parts) == 1 and len(parts[0]) == len(launched.items)
    if is_whole and isinstance(parts[0], DecodeResults):
        return launched._replace(items=parts[0])
    if is_whole and not any(any(map(field, launched.items)) for field in (_ERROR, _PROMPT_LOGPROBS, _DRAFT)):
        return launched._replace(items=tuple(parts[0]))
    read = {result.seq_id: result for part in parts for result in part}
    return launched._replace(items=tuple([_complete(item, read) for item in launched.items]))


def _complete(item: ItemResult, read: dict[int, ItemResult]) -> ItemResult:
    """Return the result of an item with what was read of it."""
    found = read.get(item.seq_id)
    if found is None or item.error is not None:
        return item
    if found.error is not None or not (item.prompt_logprobs or item.draft):
        return found
    return found._replace(prompt_logprobs=item.prompt_logprobs, draft=item.draft)


def _clear_frames(error: BaseException | None) -> None:
    """Let go of the tensors of the calls that have failed, which an error that is kept would keep: a step's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
