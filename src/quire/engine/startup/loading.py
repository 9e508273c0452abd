"""Builds an engine from a configuration: checkpoint, tokenizer, weights, then KV memory from the remaining bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from quire.config import (
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    ResolvedConfig,
    StepCost,
    resolve,
)
from quire.distributed.ranks import Ranks
from quire.engine.control.encoder_work import EncoderWork
from quire.engine.engine import Engine
from quire.engine.inputs import ranked_media
from quire.engine.inputs.embeddings import EmbeddingsReader
from quire.engine.kv.disk_prefetch import DiskPrefetcher
from quire.engine.startup.adapters import load_adapters, take_adapters
from quire.engine.startup.data_plane import open_executor, share_steps
from quire.engine.startup.encoders import encoder_config
from quire.engine.startup.image_memory import with_images
from quire.engine.startup.kv_cache import make_kv_events, open_memory, open_prefetch, open_publisher, open_stores
from quire.engine.startup.model_defaults import read_default_params
from quire.engine.startup.model_facts import cache_groups, dtype_on, model_facts, step_cost, stored_dtype
from quire.engine.startup.speculation import load_draft, make_speculation
from quire.engine.startup.tokenizers import open_tokenizer, read_end_token_ids
from quire.engine.startup.vision import load_vision, make_encoder_work, open_features, open_image_reader
from quire.engine.startup.weight_check import check_cache, check_weights
from quire.errors import ConfigError
from quire.execution.runners.executor import Executor
from quire.execution.step.image_features import ImageFeatures
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.token_chain import Namespace
from quire.memory.specs import KVCacheSpec
from quire.models.capacity.pool_sizing import check_pin_limit, fit_context, size_pool
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.pooling_config import PoolingConfig, read_pooling
from quire.models.families.encoders import find_encoder
from quire.models.families.quantization_config import check_stored_method
from quire.models.loading.loading import load_decoder, load_encoder
from quire.models.loading.weights import choose_dtype
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.encoder import Encoder
from quire.models.modules.stages import StageDecoder
from quire.ops import choose_kernels
from quire.ops.interface.ops import Ops
from quire.platform.bounded.files import user_path
from quire.platform.host_probe import num_cores, pick_device, probe
from quire.platform.malloc import keep_freed_memory, use_huge_pages
from quire.platform.numa import bound_to
from quire.scheduling.command_log import CommandLog, CommandStream
from quire.scheduling.scheduler import Scheduler
from quire.sequences.decoding.drafting import Drafter
from quire.text.structured.grammar_backend import open_grammars
from quire.text.structured.grammar_compiler import GrammarCompiler
from quire.text.structured.grammar_setup import GrammarModel
from quire.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def _unwrapped(part: Any) -> Any:
    return part


class Wrappers(NamedTuple):
    """Functions from a component of the engine, as built, to the wrapped one that the engine uses.

    Args:
        ops: wrapper of the model's kernels.
        decoder: wrapper of the model.
        scheduler: wrapper of the scheduler.
        executor: wrapper of the executor.
    """

    ops: Callable[[Ops], Ops] = _unwrapped
    decoder: Callable[[CausalModel], CausalModel] = _unwrapped
    scheduler: Callable[[Scheduler], Scheduler] = _unwrapped
    executor: Callable[[Executor], Executor] = _unwrapped


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, ready to serve.

    Args:
        name: name under which it is served.
        engine: engine of the model, which closes all parts that were opened for it.
        default_params: sampling parameters from the model's generation config.
        pooling: pooling of its embeddings.
        disk_prefetch: the engine's prefetcher of blocks outside memory; None without a disk, remote or peer cache.
        images: features of images; None for a model that reads none.
    """

    name: str
    engine: Engine
    default_params: dict[str, Any]
    pooling: PoolingConfig
    disk_prefetch: DiskPrefetcher | None = None
    images: ImageFeatures | None = None


def load_part(config: EngineConfig, wrap: Wrappers, ranks: Ranks | None) -> LoadedModel:
    """Load the part of a model that this process computes, and build its engine; see `startup.start.load`."""
    with ExitStack() as on_failure:
        # Closes what has been opened, the last part first: here after a failure, else when the engine closes.
        parts = on_failure.enter_context(ExitStack())
        if ranks is not None and ranks.is_leader:  # another rank reports its failure before it closes them
            parts.callback(ranks.close)
        try:
            loaded = _load(config, wrap, ranks, parts)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]
            raise ConfigError(
                f"model {config.model.model!r} does not start: {reason}; use a quantization, a smaller "
                "gpu_memory_utilization or max_num_batched_tokens, or a larger tensor_parallel_size",
                field="model",
            ) from error
        on_failure.pop_all()
    return loaded


def _load(config: EngineConfig, wrap: Wrappers, ranks: Ranks | None, parts: ExitStack) -> LoadedModel:
    """See `load_part`."""
    config, device = _with_kernels(config)
    options, checkpoint = config.model, _open(config.model)
    tokenizer = open_tokenizer(options, checkpoint)
    if tokenizer is not None:
        parts.callback(tokenizer.close)
    dtype = dtype_on(device, choose_dtype(options.dtype, checkpoint), options.dtype)
    _prepare_process(options, ranks)
    config, model, guide, draft = _load_models(config, checkpoint, tokenizer, device, dtype, wrap, ranks)
    is_leader = ranks is None or ranks.is_leader
    vision = load_vision(options, config.multimodal, checkpoint, device, dtype) if is_leader else None
    slots = None if isinstance(model, Encoder) else take_adapters(config.lora, checkpoint, model, ranks)
    stored = stored_dtype(config, dtype)
    groups = [spec for part in (model, draft) if part for spec in cache_groups(config, part, stored)]
    step = with_images(step_cost(config, model, draft, device, stored), vision, dtype)
    config, resolved = _resolve(config, model, groups, step, device, ranks)
    torch.set_num_threads(resolved.num_threads)
    sizing = size_pool(groups, resolved.num_blocks)
    check_pin_limit(resolved, sizing)
    name, merged = options.served_names[0], None if isinstance(model, Encoder) else model.merged_adapter
    pooling = read_pooling(checkpoint, model.spec, tokenizer, options.classifier_from_token)
    ends = read_end_token_ids(checkpoint, tokenizer)
    grammars = _open_grammars(config, tokenizer, model.spec.vocab_size, ends, parts)
    publisher = open_publisher(config, parts)
    disk = None
    if config.cache.has_stores and not isinstance(model, Encoder):
        loaded = (checkpoint, model), (guide, draft)
        models = [(files, part.spec) for files, part in loaded if files and part]
        disk = open_stores(config, models, resolved, groups, dtype, parts, ranks)
    memory = open_memory(resolved, sizing, parts, disk, config.cache.record_memory)
    images = open_features(vision, disk, parts, None if is_leader else checkpoint)
    with bound_to(() if ranks is None else ranks.home):
        executor = open_executor(model, draft, memory, resolved, dtype, stored, disk, grammars, parts, images)
    commands = None if ranks is None or not ranks.is_leader else CommandStream(ranks.send_commands)
    encoder_work = make_encoder_work(images, resolved.max_inter_token_ms, commands)
    disk_prefetch, hand_over = open_prefetch(memory, disk, config.cache, resolved, groups, parts, ranks, commands)
    speculation = make_speculation(config.speculative)
    scheduler = _scheduler(resolved, memory, disk_prefetch, speculation, config.parallel, encoder_work)
    if commands is not None:
        CommandLog(scheduler, commands, pack=ranked_media.pack)
    adapters = load_adapters(config.lora, slots, scheduler, name, ranks, commands, resolved.adapter_bytes)
    executor = share_steps(executor, ranks, resolved.num_threads, commands, parts)
    engine = Engine(
        resolved,
        wrap.scheduler(scheduler),
        wrap.executor(executor),
        tokenizer,
        end_token_ids=ends,
        cache_name=":".join((name, str(dtype), stored, *filter(None, [options.quantization, merged]))),
        parts=parts,
        disk_prefetch=disk_prefetch,
        # Keyed with the memory manager's secret, which is stored with a prefix cache on disk.
        media_reader=_media_reader(model, memory),
        image_reader=open_image_reader(vision, model.spec, checkpoint, config, resolved, memory, parts, ranks),
        encoder_work=encoder_work,
        speculation=speculation,
        grammars=grammars,
        hand_over=hand_over,
        adapters=adapters,
        ranks=ranks,
        kv_events=make_kv_events(config, publisher, memory, adapters, disk),
        can_generate=pooling.has_head,
    )
    params = read_default_params(checkpoint, options.generation_config)
    return LoadedModel(name, engine, params, pooling, disk_prefetch, images)


def _load_models(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    device: str,
    dtype: torch.dtype,
    wrap: Wrappers,
    ranks: Ranks | None,
) -> tuple[EngineConfig, CausalModel | Encoder, Checkpoint | None, CausalModel | None]:
    """Load a model, and one that makes drafts for it with its checkpoint; return them after their configuration."""
    options = config.model
    if find_encoder(checkpoint.config) is not None:
        encoder = load_encoder(
            checkpoint,
            device=device,
            dtype=dtype,
            kernels=options.kernels,
            quantization=options.quantization,
            weight_packing=options.weight_packing,
            wrap_ops=wrap.ops,
        )
        return encoder_config(config, checkpoint, encoder.spec, device), encoder, None, None
    check_weights(options, config.parallel, checkpoint, device, dtype)
    check_cache(config, checkpoint, device, dtype)
    model = wrap.decoder(_load_decoder(options, checkpoint, device, dtype, wrap.ops, config.lora, ranks))
    load_decoder_of = partial(_load_decoder, options, device=device, dtype=dtype)
    return config, model, *load_draft(config, checkpoint, model, tokenizer, load_decoder_of, ranks)


def _open(options: ModelConfig) -> Checkpoint:
    """Return the model's checkpoint, after a check that its weights are stored as the options say."""
    checkpoint = Checkpoint.open(options.model, options.revision)
    is_gguf = checkpoint.gguf_fields is not None
    check_stored_method(options.stored_quantization, checkpoint.config, is_gguf=is_gguf)
    return checkpoint


def _with_kernels(config: EngineConfig) -> tuple[EngineConfig, str]:
    """Return the configuration with the kernels chosen for its device, and the device."""
    device = pick_device(config.model.device)
    kernels = choose_kernels(torch.device(device), config.model.kernels)
    config.graphs.check_kernels(kernels)
    return replace(config, model=replace(config.model, kernels=kernels)), device


def _prepare_process(options: ModelConfig, ranks: Ranks | None) -> None:
    """Set the threads and the allocator of this process, before weights are loaded."""
    cores = num_cores()
    own = cores if ranks is None else ranks.num_threads(cores)
    if options.num_threads is not None and options.num_threads > own:
        logger.warning(
            "num_threads is %d, above the number of cores that this %s may use, which is %d: threads that wait for one "
            "another make steps slower",
            *(options.num_threads, "process" if ranks is None else "rank", own),
        )
    torch.set_num_threads(options.num_threads or own)
    use_huge_pages()
    keep_freed_memory()


def _load_decoder(
    options: ModelConfig,
    checkpoint: Checkpoint,
    device: str,
    dtype: torch.dtype,
    wrap_ops: Callable[[Ops], Ops] | None = None,
    lora: LoRAConfig | None = None,
    ranks: Ranks | None = None,
) -> CausalModel:
    """Load a decoder, with the adapter in its weights that `lora` merges."""
    merged = None if lora is None else lora.merged
    with bound_to(() if ranks is None else ranks.home):
        decoder = load_decoder(
            checkpoint,
            device=device,
            dtype=dtype,
            kernels=options.kernels,
            model_impl=options.model_impl,
            quantization=options.quantization,
            weight_packing=options.weight_packing,
            deterministic=options.deterministic,
            max_model_len=options.max_model_len,
            wrap_ops=wrap_ops,
            adapter=None if merged is None else user_path(merged[1]),
            max_lora_rank=0 if lora is None else lora.max_lora_rank,
            ranks=None if ranks is None else ranks.group,
        )
    if merged is not None:
        logger.info("Adapter %s: merged into the weights from %s", *merged)
    return decoder


def _resolve(
    config: EngineConfig,
    model: CausalModel | Encoder,
    groups: Sequence[KVCacheSpec],
    step: StepCost,
    device: str,
    ranks: Ranks | None,
) -> tuple[EngineConfig, ResolvedConfig]:
    """Return the options, fitted to the available memory, and resolved with the facts of machine and model."""
    limit = None
    if ranks is None:
        machine = probe(device)
    else:
        machine, step = ranks.agree(partial(probe, device), step)
    if not isinstance(model, Encoder):
        config, limit = fit_context(config, groups, machine, model.spec.max_position, step)
    resolved = resolve(config, machine, model_facts(config, model, groups, step, device))
    if isinstance(model, StageDecoder):
        model.check_step(resolved.max_num_batched_tokens)
    resolved = replace(resolved, fitted_from=limit)
    for line in resolved.lines():
        logger.info(line)
    return config, resolved


def _media_reader(model: CausalModel | Encoder, memory: KVCacheManager) -> EmbeddingsReader | None:
    """Return the reader of prompts' embeddings; None for an encoder, which accepts no embeddings."""
    if isinstance(model, Encoder):
        return None
    key = memory.chain([], Namespace("media")).root[0]
    return EmbeddingsReader(model.spec.width, model.dtype, key, model.spec.image_rows)


def _scheduler(
    resolved: ResolvedConfig,
    memory: KVCacheManager,
    disk_prefetch: DiskPrefetcher | None,
    drafter: Drafter | None,
    parallel: ParallelConfig,
    encoder_work: EncoderWork | None = None,
) -> Scheduler:
    return Scheduler(
        memory,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        policy=resolved.scheduling_policy,
        priority_aging=resolved.priority_aging,
        preemption_policy=resolved.preemption_policy,
        # A host tier that exists only for the disk tier has no space for preempted sequences.
        preemption_mode=resolved.preemption_mode if resolved.swap_space else "recompute",
        prefetch=None if disk_prefetch is None else disk_prefetch.prepare,
        media=encoder_work,
        drafter=drafter,
        whole_prompts=resolved.is_encoder,
        plans_ahead=resolved.async_scheduling,
        num_microbatches=parallel.num_microbatches if parallel.pipeline_parallel_size > 1 else None,
    )


def _open_grammars(
    config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: frozenset[int], parts: ExitStack
) -> GrammarCompiler | None:
    """Return the compiler of grammars; None without a tokenizer or an end token."""
    ends = sorted(token_id for token_id in end_token_ids if token_id < vocab_size)
    if tokenizer is None or not ends:
        return None
    limits = config.scheduler
    grammars = GrammarCompiler(
        open_grammars(GrammarModel(tokenizer.json_call, vocab_size, tuple(ends))),
        timeout_s=limits.grammar_timeout_s,
        memory_bytes=limits.grammar_memory_bytes,
    )
    parts.callback(grammars.close)
    return grammars
