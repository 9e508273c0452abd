"""The model runner: obeys one plan at a time, on one device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from quire.execution.batch import BatchBuilder, end_rows
from quire.execution.block_copies import BlockCopier
from quire.execution.draft_model import DraftModel, with_drafts
from quire.execution.embeddings import MultimodalEmbeddings
from quire.execution.kv_storage import Storage, make_storages
from quire.execution.mtp_drafter import MTPDrafter
from quire.execution.sampling.logprobs import measure, rows_per_tile
from quire.execution.sampling.row_sampling import BAD_LOGITS
from quire.execution.sampling.sampler import Sampler
from quire.kvstore.disk_blocks import DiskBlocks
from quire.memory.results import MemoryOps
from quire.models.decoder import Decoder
from quire.models.mtp import MTPHead
from quire.platform.host_probe import num_cores
from quire.platform.prefault import Prefaulter
from quire.scheduling.plan import (
    BeamGroup,
    Candidate,
    ItemResult,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.structured.grammar_cache import GrammarCache
from quire.structured.mask_filler import GrammarStates

logger = logging.getLogger(__name__)


class ModelRunner:
    """Turns a plan into a result: bytes are moved, the model runs, tokens are drawn.

    It decides nothing, and keeps of a sequence only what its opening and later items said, until the plan closes it.

    Args:
        decoder: the model.
        storages: memory, one for each cache group, those of `draft` last.
        builder: turns a plan into the models' inputs.
        sampler: turns logits into tokens.
        media: has the embeddings that come with prompts.
        host_bytes: number of bytes of the host tier; 0 for none.
        disk: the tier below that, if there is one.
        draft: a second model that makes drafts, or the first one's MTP head; its cache groups follow the first one's.
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
        draft: Decoder | None = None,
        prefaulter: Prefaulter | None = None,
    ) -> None:
        num_own = len(decoder.cache_groups)
        self._decoder = decoder
        self._groups = range(num_own)
        self._storages = tuple(storages[:num_own])
        self._blocks = BlockCopier(storages, host_bytes, disk)
        self._draft: DraftModel | MTPDrafter | None = None
        groups = range(num_own, len(storages))
        if isinstance(draft, MTPHead):
            self._draft = MTPDrafter(draft, builder, storages[num_own:], groups)
        elif draft is not None:
            self._draft = DraftModel(draft, builder, storages[num_own:], groups)
        self._builder = builder
        self._sampler = sampler
        self._embeddings = media
        self._prefaulter = prefaulter

    @classmethod
    def build(
        cls,
        decoder: Decoder,
        *,
        num_blocks: Sequence[int],
        block_size: int,
        device: str,
        dtype: torch.dtype,
        stored: str | None = None,
        host_bytes: int = 0,
        disk: DiskBlocks | None = None,
        draft: Decoder | None = None,
        grammars: GrammarCache | None = None,
    ) -> ModelRunner:
        """Give a loaded decoder its KV memory, and all else that a step takes.

        Args:
            decoder: decoder with all its weights.
            num_blocks: B for each cache group, the null block included: all that its view of the shared memory has.
            block_size: N.
            device: the decoder's.
            dtype: the decoder's.
            stored: see `quire.execution.kv_storage.KVStorage`.
            host_bytes: number of bytes of the host tier; 0 for none.
            disk: the tier below that, if there is one.
            draft: see `ModelRunner`, of the same dtype; its cache groups come last in `num_blocks`.
            grammars: compiled ones; None where no output can be constrained.
        """
        torch_device = torch.device(device)
        groups = (*decoder.cache_groups, *(() if draft is None else draft.cache_groups))
        storages = make_storages(groups, num_blocks, block_size, dtype, torch_device, stored)
        builder = BatchBuilder(block_size, torch_device, [group.cache for group in groups])
        grammar_states = None
        if grammars is not None:
            uses_thread = torch_device.type != "cpu" or torch.get_num_threads() < num_cores()
            grammar_states = GrammarStates(grammars, uses_thread=uses_thread)
        sampler = Sampler(torch_device, grammar_states, decoder.ops.apply_token_bitmask)
        prefaulter = Prefaulter.of([storage.data for storage in storages])
        return cls(
            decoder, storages, builder, sampler, MultimodalEmbeddings(torch_device), host_bytes, disk, draft, prefaulter
        )

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
        if self._prefaulter is None:
            return self._run(plan)
        self._prefaulter.begin(plan.items)
        try:
            return self._run(plan)
        finally:
            self._prefaulter.end()

    def _run(self, plan: StepPlan) -> StepResult:
        if plan.ops.copies:
            self._blocks.apply(plan.ops.copies, plan.ops.saves)
        if plan.finished_ids or any(item.new_sequence is not None for item in plan.items):
            self._embeddings.apply_plan(plan)
        self._builder.apply_plan(plan)
        items: Sequence[ScheduledSequence] = plan.items if self._draft is None else self._draft.guess(plan.items)
        self._sampler.begin_step(plan._replace(items=tuple(items)))
        batch = self._builder.lay_out(items, self._groups)
        given = self._embeddings.rows(plan.items, batch.row_starts) if self._embeddings.by_sequence else None
        counts = [item.num_draft + 1 if item.num_samples else 0 for item in items]
        is_measured = self._sampler.measures_prompts(items)  # then every row is read, else what is sampled
        reads_all = is_measured or isinstance(self._draft, MTPDrafter)
        read = None if reads_all else self._builder.lay_out_ends(items, counts, self._groups)
        hidden = self._decoder(batch.input_ids, batch.positions, batch.groups, self._storages, given, read)
        if isinstance(self._draft, MTPDrafter):
            self._draft.follow(items, hidden, given)
        sampled = hidden[end_rows(items, counts)] if reads_all else hidden
        results, found = self._sample(items, plan.beams, sampled)
        if is_measured:
            starts = batch.row_starts[:-1]
            results = [
                self._with_prompt(result, item, hidden[start:])
                for result, item, start in zip(results, items, starts, strict=True)
            ]
        if self._draft is not None:
            results = with_drafts(results, plan.items, items)
        return StepResult(plan.tick, tuple(results), found)

    def _sample(
        self,
        items: Sequence[ScheduledSequence],
        beams: Sequence[BeamGroup],
        hidden: torch.Tensor,
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Draw the tokens of all items from the hidden states of their last rows, [R, E].

        Of an item with drafts these are the rows of the drafts, and of the token before them.

        Returns:
            A result for each item, and the candidates of each group of beams.
        """
        sampled = [item for item in items if item.num_samples]
        if not sampled:
            return [ItemResult(item.seq_id, ()) for item in items], ()
        logits = self._decoder.logits(hidden)
        try:
            drawn, found = self._sampler.search(logits, sampled, beams)
        except Exception:
            logger.exception("sampling %d sequences at once failed; each is sampled by itself", len(sampled))
            drawn, found = self._sampler.sample_apart(lambda rows: self._decoder.logits(hidden[rows]), sampled, beams)
        if len(sampled) == len(items):
            return drawn, found
        results = iter(drawn)
        return [next(results) if item.num_samples else ItemResult(item.seq_id, ()) for item in items], found

    def _with_prompt(self, result: ItemResult, item: ScheduledSequence, hidden: torch.Tensor) -> ItemResult:
        """Add the log probabilities of the prompt's tokens, where the request wants them.

        The head runs on a few rows at a time: the logits of a whole prompt would be larger than the model.

        Args:
            result: the item's result so far.
            item: item of the plan.
            hidden: hidden states, the item's own from row 0 on, [at least len, E].
        """
        token_ids, count = self._sampler.prompt_targets(item)
        if not token_ids or result.error is not None:
            return result
        measures: list[TokenLogprobs] = []
        tile = rows_per_tile(self._decoder.spec.vocab_size)
        for start in range(0, len(token_ids), tile):
            part = token_ids[start : start + tile]
            logits = self._decoder.logits(hidden[start : start + len(part)])
            if not logits.amax(-1).isfinite().all():
                return ItemResult(item.seq_id, (), error=BAD_LOGITS)
            measures += measure(logits, part, [count] * len(part))
        return result._replace(prompt_logprobs=tuple(measures))
