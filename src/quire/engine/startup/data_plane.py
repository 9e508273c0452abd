"""Builds the executor of a loaded model, which allocates the KV memory, and shares its steps with other ranks."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch

from quire.config import ResolvedConfig
from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.distributed.ranks import Ranks
from quire.execution.capture.captured_steps import CaptureOptions
from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.runners.build import build_runner
from quire.execution.runners.encoder_runner import EncoderRunner
from quire.execution.runners.executor import Executor
from quire.execution.runners.ranked_executor import RankedExecutor
from quire.execution.runners.runner import InProcessExecutor
from quire.execution.step.image_features import ImageFeatures
from quire.memory.manager import KVCacheManager
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.encoder import Encoder
from quire.scheduling.command_log import CommandStream
from quire.text.structured.grammar_compiler import GrammarCompiler

logger = logging.getLogger(__name__)


def open_executor(
    model: CausalModel | Encoder,
    draft: CausalModel | None,
    memory: KVCacheManager,
    resolved: ResolvedConfig,
    dtype: torch.dtype,
    stored: str,
    disk: DiskBlocks | None,
    grammars: GrammarCompiler | None,
    parts: ExitStack,
    images: ImageFeatures | None = None,
) -> Executor:
    """Return the executor of a model, with the KV memory of a decoder; see `build_runner`."""
    if isinstance(model, Encoder):
        executor = InProcessExecutor(EncoderRunner(model))
    else:
        options = CaptureOptions(
            resolved.cudagraph_capture_sizes,
            resolved.max_model_len,
            resolved.piecewise_cudagraph_capture_sizes,
            resolved.max_num_seqs,
        )
        deferred = DeferredTokens(torch.device(resolved.device), model.ranks) if resolved.async_scheduling else None
        runner = build_runner(
            model,
            num_blocks=[len(group.pool.ref_counts) for group in memory.groups],
            block_size=resolved.block_size,
            device=resolved.device,
            dtype=dtype,
            stored=stored,
            host_bytes=resolved.host_bytes,
            disk=disk,
            draft=draft,
            grammars=None if grammars is None else grammars.grammars,
            captured=options if options.sizes or options.piece_sizes else None,
            deferred=deferred,
            images=images,
        )
        executor = InProcessExecutor(runner, deferred)
    parts.callback(executor.close)
    return executor


def share_steps(
    executor: Executor, ranks: Ranks | None, num_threads: int, commands: CommandStream | None, parts: ExitStack
) -> Executor:
    """Return the executor of a rank, which on rank 0 tells the others by `commands` when it closes."""
    if ranks is None:
        return executor
    cores = ranks.cores(num_threads)
    if cores:
        logger.info("rank %d: threads on cores %s", ranks.rank, ", ".join(map(str, cores)))
    ranked = RankedExecutor(executor, ranks, cores, None if commands is None else commands.close)
    parts.callback(ranked.close)
    return ranked
