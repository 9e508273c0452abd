"""The KV memory that an engine would have, from `config.json` and options alone.

Each step is a function of the engine; only the memory of the machine is stated instead of probed, and the memory of a
step on a GPU is estimated instead of measured:

```
config.json  ->  family  ->  ModelSpec  ->  cache specs  ->  ArenaSizing  ->  MemoryPlan
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.config import (
    CACHE_DTYPES,
    DTYPES,
    Machine,
    ModelConfig,
    ParallelConfig,
    Quantization,
    StepCost,
    context_length,
    pool_blocks,
)
from quire.errors import CheckpointError, ConfigError, shown
from quire.memory.capacity.sizing import ArenaSizing, most_bytes, sequence_bytes, tokens_bytes
from quire.memory.specs import KVCacheSpec
from quire.models.capacity.draft_compat import check_draft, mtp_spec
from quire.models.capacity.gpu_budget import plan_gpu, step_cost
from quire.models.capacity.pool_sizing import MIN_FITTED_CONTEXT, memory_concurrency, size_pool
from quire.models.capacity.report import GPUPlan, GroupPlan, LengthPlan, MemoryPlan, PlanRequest
from quire.models.checkpoints.checkpoint import find_gguf, read_config
from quire.models.checkpoints.vision_files import find_mmproj
from quire.models.families.quantization_config import (
    check_stored_method,
    read_quantization_config,
    without_quantization,
)
from quire.models.families.vision_towers import build_vision, find_tower
from quire.models.gguf.reader import GGUFFile
from quire.models.hosted.choice import one_process_only, read_decoder
from quire.models.specs.cache_layout import cache_specs
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.parameter_estimate import estimate_vision, smaller_forms, weight_bytes
from quire.models.specs.spec import ModelSpec, StateCacheShape, TokenCacheShape
from quire.platform.bounded.files import user_path

# The method of checkpoints that store only experts quantised.
MXFP4 = "mxfp4"
# Number of blocks of a pool without room for the null blocks.
NO_BLOCKS = -1
UNCOUNTED = (
    "The memory of steps on the GPU is estimated. Not counted are the CUDA context, and what the driver keeps of each "
    "captured step."
)
# Default sequence lengths of a plan: these below `max_model_len`, and `max_model_len` itself.
LENGTHS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model as its `config.json` describes it.

    Args:
        architecture: name of the architecture.
        raw: content of `config.json`.
        spec: the model, or the layers of one of several GPUs.
        stored: `spec` with the tables and the head that this GPU stores.
        stored_bytes: bytes of the weights in a GGUF file, which take about as many in memory; None for other
            checkpoints.
        method: quantisation method of another checkpoint; None for plain weights.
    """

    architecture: str
    raw: Mapping[str, Any]
    spec: ModelSpec | HostedSpec
    stored: ModelSpec | HostedSpec
    stored_bytes: int | None
    method: str | None

    @classmethod
    def read(cls, options: ModelConfig, name: str, revision: str | None, wanted: str | None = None) -> _Model:
        """Read a model's configuration as the engine does."""
        raw = read_config(name, revision)
        method = read_quantization_config(raw)
        spec = read_decoder(raw, options.model_impl).spec
        file = find_gguf(name, revision)
        check_stored_method(wanted, raw, is_gguf=file is not None)
        stored_bytes = None
        if file is not None:
            stored_bytes = _stored_bytes(file)
        method_name = None if method is None else method.method
        return cls(str(raw["architectures"][0]), raw, spec, spec, stored_bytes, method_name)

    def divided(self, parallel: ParallelConfig) -> _Model:
        """Return the part of one of several GPUs."""
        if parallel.tensor_parallel_size == 1:
            return self
        if isinstance(self.spec, HostedSpec):
            raise one_process_only()
        from quire.models.capacity.rank_part import rank_spec, stored_spec  # imports torch

        spec, num_bytes = rank_spec(self.spec, parallel), self.stored_bytes
        share = None if num_bytes is None else -(-num_bytes // parallel.tensor_parallel_size)
        return replace(self, spec=spec, stored=stored_spec(spec, parallel), stored_bytes=share)


@dataclass(frozen=True, slots=True)
class _Dtypes:
    """Names of the dtypes of the weights, and of keys and values."""

    weights: str
    cache: str


def plan_memory(request: PlanRequest) -> MemoryPlan:
    """Size the KV memory of a model from its `config.json`.

    Raises:
        UnsupportedModel: the engine does not run this model.
        ConfigError: an option cannot be honoured, or the configuration cannot be read; the message names the field and
            the allowed values.
    """
    options = request.config.model
    notes: list[str] = []
    target = _Model.read(options, options.model, options.revision, options.stored_quantization)
    draft = _read_draft(request, target)
    target = target.divided(request.config.parallel)
    # Each rank has the whole draft model.
    if draft is not None and request.config.speculative.draft_model is None:
        draft = draft.divided(request.config.parallel)
    models = (target,) if draft is None else (target, draft)
    weights_dtype = _weights_dtype(options.dtype, target.raw, notes)
    cache_dtype = request.config.cache.kv_cache_dtype
    dtypes = _Dtypes(weights_dtype, weights_dtype if cache_dtype == "auto" else cache_dtype)
    encoder_bytes = _encoder_bytes(request, target.raw, weights_dtype)
    weights_bytes = _weights_bytes(request, models, weights_dtype, encoder_bytes or 0)
    if target.method not in (None, MXFP4) and weights_bytes is not None and request.weights_bytes is None:
        notes.append(
            f"The weights are stored quantised ({target.method}) and take less than the estimate, which is of their "
            "dtype: give weights_bytes."
        )
    max_model_len = context_length(options.max_model_len, target.spec.max_position)
    specs = _specs(request, models, dtypes)
    gpu = _plan_gpu(request, models, max_model_len, weights_dtype)
    if gpu is not None:
        notes.append(UNCOUNTED)
    image_bytes = _image_bytes(request, target.raw, weights_dtype)
    sizing = _size_arena(request, specs, max_model_len, weights_bytes, gpu, step_cost(gpu, image_bytes or 0))
    groups = tuple(_group_plans(request, models, sizing))
    longest = sizing.longest(max_model_len) if request.has_budget else None
    lengths = tuple(_length_plan(request, sizing, length) for length in _lengths(request.lengths, max_model_len))
    max_num_seqs = request.config.scheduler.max_num_seqs
    if any(length.concurrency == max_num_seqs for length in lengths):
        notes.append(
            f"No more than max_num_seqs={max_num_seqs} sequences run at once, whatever the memory has room for."
        )
    if options.max_model_len is None and longest is not None and MIN_FITTED_CONTEXT <= longest < max_model_len:
        notes.append(
            f"Without max_model_len, the engine serves contexts of {longest:,} tokens in this memory; the model could "
            f"serve {max_model_len:,}, for which the lines below are."
        )
    return MemoryPlan(
        model=options.model,
        architecture=target.architecture,
        draft_model=request.config.speculative.draft_model,
        draft_architecture=None if draft is None else draft.architecture,
        dtype=dtypes.weights,
        kv_cache_dtype=dtypes.cache,
        block_size=request.config.cache.block_size,
        max_model_len=max_model_len,
        groups=groups,
        bytes_per_token=tokens_bytes(specs) // specs[0].block_size,
        weights_bytes=weights_bytes,
        encoder_bytes=encoder_bytes,
        image_bytes=image_bytes,
        is_weights_estimate=weights_bytes is not None
        and request.weights_bytes is None
        and any(model.stored_bytes is None for model in models),
        gpu=gpu,
        arena_bytes=sizing.num_bytes if request.has_budget else None,
        longest=longest,
        never=None if longest is None else _never(sizing, groups, longest, max_model_len),
        lengths=lengths,
        sequence_bytes=sequence_bytes(specs, max_model_len),
        notes=tuple(notes),
    )


# ---- the configuration ----


def _read_draft(request: PlanRequest, target: _Model) -> _Model | None:
    """Return the draft model, or the target's MTP head, after a check; None if the options ask for neither."""
    name = request.config.speculative.draft_model
    if request.config.speculative.speculative_method == "mtp":
        head = mtp_spec(request.config.model.model, target.spec)
        # The bytes of a GGUF file include the head's.
        return replace(target, architecture="MTP head", spec=head, stored=head, stored_bytes=target.stored_bytes and 0)
    if name is None:
        return None
    draft = _Model.read(request.config.model, name, None)
    check_draft(request.config, target.spec, draft.spec)
    return draft


def _weights_dtype(option: str, raw: Mapping[str, Any], notes: list[str]) -> str:
    """Return the dtype of the weights that the engine would choose, as far as it depends on no weights."""
    if option != "auto":
        return option
    part = raw.get("text_config")
    homes = [raw, part] if isinstance(part, Mapping) else [raw]
    stated = next((home[name] for home in homes for name in ("dtype", "torch_dtype") if home.get(name)), None)
    if stated is None:
        notes.append("config.json states no dtype: bfloat16 is assumed; set --dtype where it is another.")
        return "bfloat16"
    if stated not in DTYPES[1:]:
        raise CheckpointError(
            f"config.json states the dtype {shown(stated)}, and auto keeps it: set dtype to one of "
            f"{', '.join(DTYPES[1:])}",
            field="dtype",
        )
    return str(stated)


def _stored_bytes(file: Path) -> int:
    """Return the bytes of the tensors in a GGUF file."""
    return sum(tensor.num_bytes for tensor in GGUFFile.open(file).tensors.values())


def _encoder_bytes(request: PlanRequest, raw: Mapping[str, Any], dtype: str) -> int | None:
    """Return the bytes of the encoder of images that the engine would load; None if it would load none."""
    options = request.config.model
    reads_images = request.config.multimodal.max_images > 0 and options.model_impl != "transformers"
    if not reads_images or find_tower(raw) is None:
        return None
    model = find_gguf(options.model, options.revision)
    try:
        if model is not None:
            path = find_mmproj(model) if options.mmproj is None else user_path(options.mmproj)
            return None if path is None else _stored_bytes(path)
        built = build_vision(without_quantization(raw), ())
    except ConfigError:
        if options.mmproj is not None:
            raise
        return None  # images are refused, and texts are served
    if built is None:
        return None
    return estimate_vision(built[0]).num_bytes(CACHE_DTYPES[dtype].element_bytes, options.quantization)


def _image_bytes(request: PlanRequest, raw: Mapping[str, Any], dtype: str) -> int | None:
    """Return the bytes that are set aside for images; None for no images."""
    if request.find_images is None or find_tower(raw) is None:
        return None
    images = request.find_images(request.config, raw)
    return None if images is None else images.num_bytes(CACHE_DTYPES[dtype].element_bytes)


def _weights_bytes(request: PlanRequest, models: Sequence[_Model], dtype: str, encoder_bytes: int) -> int | None:
    """Return the bytes of the weights of all models and the encoder; None if the request states no memory."""
    if request.memory_bytes is None:
        return None
    weights_bytes = request.weights_bytes
    if weights_bytes is None:
        form = request.config.model.quantization
        weights_bytes = encoder_bytes + sum(
            _estimate(request, model, dtype, form) if model.stored_bytes is None else model.stored_bytes
            for model in models
        )
    if weights_bytes >= request.memory_bytes:
        raise ConfigError(
            f"memory ({request.memory_bytes:,} bytes) does not hold the weights ({weights_bytes:,} bytes): "
            f"{_smaller_weights(request, models, dtype)}give more, or state with weights_bytes what they really take",
            field="memory",
        )
    return weights_bytes


def _estimate(request: PlanRequest, model: _Model, dtype: str, form: Quantization | None) -> int:
    """Estimate the bytes of a model's weights; a draft model is loaded in the dtype of its target."""
    element_bytes, is_mxfp4 = CACHE_DTYPES[dtype].element_bytes, model.method == MXFP4
    return weight_bytes(model.stored, element_bytes, form, request.device, is_mxfp4=is_mxfp4)


def _smaller_weights(request: PlanRequest, models: Sequence[_Model], dtype: str) -> str:
    """Return a proposal to round the weights, with the bytes of each form; "" if their size is not an estimate."""
    current = request.config.model.quantization
    if request.weights_bytes is not None or any(model.method or model.stored_bytes is not None for model in models):
        return ""
    proposals = []
    for form in smaller_forms(current):
        num_bytes = sum(_estimate(request, model, dtype, form) for model in models)
        fits = "fits" if num_bytes < (request.memory_bytes or 0) else "does not fit either"
        proposals.append(f"--quantization {form} takes about {num_bytes:,} bytes, which {fits}")
    return "".join(f"{proposal}; " for proposal in proposals)


# ---- sizes ----


def _specs(request: PlanRequest, models: Sequence[_Model], dtypes: _Dtypes) -> tuple[KVCacheSpec, ...]:
    """Return the cache specs of all models, the target's first."""
    input_bytes = CACHE_DTYPES[dtypes.weights].element_bytes
    sizes = request.config.cache.block_size, CACHE_DTYPES[dtypes.cache], input_bytes
    return tuple(spec for model in models for spec in cache_specs(model.spec, *sizes))


def _plan_gpu(request: PlanRequest, models: Sequence[_Model], max_model_len: int, dtype: str) -> GPUPlan | None:
    """Return the memory of a GPU and of its steps; None on a CPU, or if the request states no memory."""
    if not request.is_gpu or request.memory_bytes is None:
        return None
    specs, element_bytes = [model.spec for model in models], CACHE_DTYPES[dtype].element_bytes
    return plan_gpu(request.config, specs, max_model_len, element_bytes, request.memory_bytes)


def _size_arena(
    request: PlanRequest,
    specs: Sequence[KVCacheSpec],
    max_model_len: int,
    weights_bytes: int | None,
    gpu: GPUPlan | None,
    cost: StepCost,
) -> ArenaSizing:
    """Return the arena that an engine with these options would have; an empty arena without a budget."""
    if not request.has_budget:
        return ArenaSizing.of(specs, 0)
    cache, max_num_seqs = request.config.cache, request.config.scheduler.max_num_seqs
    if request.memory_bytes is None:
        # Only the size of the cache is stated.
        available_bytes = (cache.kv_cache_memory_bytes or 0) + cost.image_bytes
    else:
        available_bytes = request.memory_bytes - (weights_bytes or 0)
    num_blocks, _ = pool_blocks(
        cache,
        Machine(
            device=request.device,
            available_bytes=available_bytes,
            num_threads=1,
            total_bytes=None if gpu is None else gpu.memory_bytes,
        ),
        tokens_bytes(specs),
        max_model_len,
        max_num_seqs,
        most_bytes(specs, max_model_len, max_num_seqs, cache.state_snapshot_interval),
        cost,
    )
    # The number is negative if a GPU has too little memory.
    return size_pool(specs, max(num_blocks, NO_BLOCKS))


def _group_plans(request: PlanRequest, models: Sequence[_Model], sizing: ArenaSizing) -> Iterator[GroupPlan]:
    groups = [(group, model is not models[0]) for model in models for group in model.spec.cache_groups]
    for (group, is_draft), spec, count in zip(groups, sizing.specs, sizing.num_blocks, strict=True):
        size = spec.bytes_per_block
        yield GroupPlan(
            kind=_kind(group.cache),
            is_draft=is_draft,
            num_layers=group.num_layers,
            bytes_per_token=None if spec.is_recurrent else size // spec.block_size,
            bytes_per_block=None if spec.is_recurrent else size,
            bytes_per_sequence=size if spec.is_recurrent else None,
            num_blocks=count if request.has_budget else None,
        )


def _kind(cache: TokenCacheShape | StateCacheShape) -> str:
    if isinstance(cache, StateCacheShape):
        return "recurrent state"
    if cache.window is not None:
        return f"window of {cache.window} tokens"
    return "all tokens" if cache.chunk is None else f"chunks of {cache.chunk} tokens"


def _lengths(asked: tuple[int, ...], max_model_len: int) -> Iterator[int]:
    for length in asked:
        if not 0 < length <= max_model_len:
            raise ConfigError(
                f"lengths must be from 1 to max_model_len ({max_model_len}), got {length}", field="lengths"
            )
    yield from asked or (*(length for length in LENGTHS if length < max_model_len), max_model_len)


def _length_plan(request: PlanRequest, sizing: ArenaSizing, num_tokens: int) -> LengthPlan:
    concurrency = None
    if request.has_budget:
        fit = memory_concurrency(request.config, sizing, num_tokens, request.device)
        concurrency = min(fit, request.config.scheduler.max_num_seqs)
    return LengthPlan(
        num_tokens=num_tokens,
        sequence_bytes=sequence_bytes(sizing.specs, num_tokens),
        concurrency=concurrency,
    )


def _never(sizing: ArenaSizing, groups: Sequence[GroupPlan], longest: int, max_model_len: int) -> str:
    """Return a sentence about the prompts that never fit, with the reason."""
    if longest == max_model_len:
        return f"Prompts of {max_model_len:,} tokens and more never fit: max_model_len leaves no room for a new token."
    shortage = sizing.shortage(longest + 1)
    assert shortage is not None
    block_of_all = tokens_bytes(sizing.specs)
    # The engine gives the cache whole blocks of every group.
    least = -(-sizing.bytes_for(max_model_len) // block_of_all) * block_of_all
    is_alone = len(groups) == 1
    largest = groups[shortage.group_idx]
    whose = " of the draft model or head" if largest.is_draft else ""
    most = "" if is_alone else f", most of them for {largest.kind!r}{whose}"
    text = (
        f"Sequences of more than {longest:,} tokens, prompt and output together, never fit: {longest + 1:,} would need "
        f"{shortage.needed:,} {'blocks' if is_alone else 'slabs'} of {sizing.layout.slab_bytes:,} bytes{most}; there "
        f"are {shortage.available:,}. max_model_len={max_model_len} needs kv_cache_memory_bytes of at least {least} "
        "bytes"
    )
    return text + (f", or lower max_model_len to {longest}." if longest else ".")
