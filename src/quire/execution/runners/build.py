"""Builds the model runner of a loaded model, with its KV memory, sampler, drafter and captured steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.execution.capture.captured_steps import CaptureOptions, capture_steps, has_captured_passes
from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.device_tokens.device_tokens import DraftTokens
from quire.execution.drafts.draft_model import DraftModel
from quire.execution.drafts.mtp_drafter import MTPDrafter
from quire.execution.runners.runner import ModelRunner
from quire.execution.sampling.device.device_draws import TorchDraws
from quire.execution.sampling.device.device_rows import warm_up
from quire.execution.sampling.sampler import Sampler
from quire.execution.step.batch import BatchBuilder
from quire.execution.step.embeddings import MultimodalEmbeddings
from quire.execution.step.image_features import ImageFeatures
from quire.execution.step.kv_storage import make_storages
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.mtp import MTPHead
from quire.ops.interface.static_steps import MakesStaticSteps
from quire.ops.interface.token_draws import DrawsTokens
from quire.platform.host_probe import num_cores
from quire.platform.prefault import Prefaulter
from quire.text.structured.grammar_backend import GrammarBackend
from quire.text.structured.mask_filler import GrammarStates


def build_runner(
    decoder: CausalModel,
    *,
    num_blocks: Sequence[int],
    block_size: int,
    device: str,
    dtype: torch.dtype,
    stored: str | None = None,
    host_bytes: int = 0,
    disk: DiskBlocks | None = None,
    draft: CausalModel | None = None,
    grammars: GrammarBackend | None = None,
    captured: CaptureOptions | None = None,
    deferred: DeferredTokens | None = None,
    images: ImageFeatures | None = None,
) -> ModelRunner:
    """Return the runner of a loaded decoder, with its KV memory.

    Args:
        decoder: decoder with all its weights.
        num_blocks: B of each cache group, the null block included: the size of its view of the shared memory.
        block_size: N.
        device: the decoder's.
        dtype: the decoder's.
        stored: see `quire.execution.step.kv_storage.KVStorage`.
        host_bytes: number of bytes of the host tier; 0 for none.
        disk: the disk tier; None for none.
        draft: see `ModelRunner`, of the same dtype; its cache groups come last in `num_blocks`.
        grammars: the model's grammars; None if no output can be constrained.
        captured: steps to capture; None for none.
        deferred: device tokens of steps, which are read after the next step was launched; None to read them with each
            step.
        images: features of images; None for a model without an encoder of them.
    """
    torch_device = torch.device(device)
    groups = (*decoder.cache_groups, *(() if draft is None else draft.cache_groups))
    storages = make_storages(groups, num_blocks, block_size, dtype, torch_device, stored)
    caches = [group.cache for group in groups]
    grammar_states = None
    if grammars is not None:
        overlaps = torch_device.type != "cpu" or torch.get_num_threads() < num_cores()
        source = grammars.mask_source(overlaps=overlaps)
        grammar_states = GrammarStates(source, grammars.model.vocab_size, grammars.model.end_token_ids)
    keep = decoder.ops.apply_token_bitmask
    draws = decoder.ops if isinstance(decoder.ops, DrawsTokens) else TorchDraws()
    if isinstance(decoder.ops, DrawsTokens) and torch_device.type != "cpu":
        with torch.inference_mode():
            warm_up(draws, decoder.spec.vocab_size, torch_device)
    # On a GPU, with interpreted kernels or deferred tokens, the device draws rows: the host waits for tokens only.
    is_apart = torch_device.type != "cpu" or isinstance(decoder.ops, MakesStaticSteps) or deferred is not None
    if decoder.is_follower:
        sampler = Sampler(torch_device, is_follower=True)
    else:
        sampler = Sampler(torch_device, grammar_states, keep, draws if is_apart else None, deferred)
    drafts = None if draft is None else DraftTokens()
    # With a draft model no plan is made ahead, so the only placeholders are drafts.
    media = MultimodalEmbeddings(torch_device, images)
    builder = BatchBuilder(block_size, torch_device, caches, drafts or deferred, media.by_sequence)
    own, drafter, steps, passes = len(decoder.cache_groups), None, None, None
    if captured is not None:
        steps = capture_steps(decoder, storages[:own], num_blocks[:own], block_size, captured)
        if draft is not None and has_captured_passes(draft):
            of_draft = storages[own:], num_blocks[own:], block_size, captured.of_draft()
            passes = capture_steps(draft, *of_draft, first_group=own)
    if draft is not None and drafts is not None:
        ladder = None if passes is None else passes.ladder
        parts = builder, drafts, storages[own:], range(own, len(storages)), ladder
        drafter = MTPDrafter(draft, *parts) if isinstance(draft, MTPHead) else DraftModel(draft, *parts)
    prefaulter = Prefaulter.of([storage.data for storage in storages], builder.use)
    return ModelRunner(decoder, storages, builder, sampler, media, host_bytes, disk, drafter, prefaulter, steps)
