"""From a configuration alone to the KV memory that an engine would have: no weights, no tensors.

Options, families, specs and slabs are the engine's own; only what was found on the machine is stated instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config import CACHE_DTYPES, DTYPES, EngineConfig, Machine, context_length, pool_blocks
from quire.engine.draft_fit import ModelLimits, check_draft
from quire.engine.memory_plan import Alternative, GroupPlan, LengthPlan, MemoryPlan, PlanRequest
from quire.engine.pool_sizing import memory_concurrency, size_pool
from quire.errors import CheckpointError, ConfigError, UnsupportedModel, shown
from quire.memory.sizing import (
    ArenaSizing,
    most_bytes,
    paged_bytes,
    sequence_bytes,
    tokens_bytes,
)
from quire.memory.specs import KVCacheSpec
from quire.models.cache_layout import AttentionLayer, CacheLayout, StateLayer, layout_of, read_layout, text_fields
from quire.models.checkpoint import read_config
from quire.models.families import FAMILIES, build
from quire.models.parameter_estimate import estimate_parameters

# Sequence lengths that are looked at when none are asked for; those below `max_model_len`, and that itself.
LENGTHS = (512, 2048, 8192, 32768, 131072)
GENEROUS_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class _Config:
    """What a model's configuration says: its fields, its layers, who read them, and maybe its vocabulary."""

    raw: Mapping[str, Any]
    layout: CacheLayout
    origin: str
    vocab_size: int | None

    @property
    def limits(self) -> ModelLimits:
        """What a draft model and its target must agree on."""
        return ModelLimits(self.vocab_size, self.layout.max_position)


@dataclass(frozen=True, slots=True)
class _Model:
    """What is to be held: the layers of the model, then of a draft model; the weights' dtype, and maybe their bytes."""

    layouts: tuple[CacheLayout, ...]
    dtype: str
    weights_bytes: int | None

    @property
    def max_position(self) -> int:
        """Tokens of the longest context."""
        return self.layouts[0].max_position

    @property
    def layers(self) -> tuple[tuple[AttentionLayer | StateLayer, int, bool], ...]:
        """What the layers of each cache group keep, how many there are, and whether they are the draft model's."""
        return tuple(
            (layer, num_layers, is_draft)
            for is_draft, layout in zip((False, True), self.layouts, strict=False)
            for layer, num_layers in layout.attention + layout.states
        )


def plan_memory(request: PlanRequest) -> MemoryPlan:
    """Size the KV memory of a model from its `config.json`.

    Raises:
        ConfigError: an option that cannot be honoured, or a configuration that cannot be read; the message says which
            field, and what is allowed.
    """
    options = request.config.model
    notes: list[str] = []
    target = _read_config(options.model, options.revision, notes)
    draft = _read_draft(request.config, target, notes)
    both = (target,) if draft is None else (target, draft)
    dtype = _dtype(options.dtype, target.raw, notes)
    weights_bytes = _weights_bytes(request, both, dtype, notes)
    model = _Model(tuple(each.layout for each in both), dtype, weights_bytes)
    max_model_len = context_length(options.max_model_len, model.max_position)
    sizing = _size(request, model)
    specs = sizing.specs
    longest = sizing.longest(max_model_len) if request.has_budget else None
    lengths = tuple(_length_plan(request, sizing, length) for length in _lengths(request.lengths, max_model_len))
    max_num_seqs = request.config.scheduler.max_num_seqs
    if any(each.concurrency == max_num_seqs for each in lengths):
        notes.append(
            f"No more than max_num_seqs={max_num_seqs} sequences run at once, whatever the memory has room for."
        )
    return MemoryPlan(
        model=options.model,
        architecture=_architecture(target.raw),
        origin=target.origin,
        draft_model=request.config.speculative.draft_model,
        draft_architecture=None if draft is None else _architecture(draft.raw),
        draft_origin=None if draft is None else draft.origin,
        dtype=dtype,
        kv_cache_dtype=_kv_cache_dtype(request, model),
        block_size=request.config.cache.block_size,
        max_model_len=max_model_len,
        groups=tuple(_group_plans(request, model, sizing)),
        bytes_per_token=_bytes_per_token(sizing),
        weights_bytes=weights_bytes,
        is_weights_estimate=weights_bytes is not None and request.weights_bytes is None,
        arena_bytes=sizing.num_bytes if request.has_budget else None,
        longest=longest,
        never=None if longest is None else _never(sizing, model, longest, max_model_len),
        lengths=lengths,
        sequence_bytes=sequence_bytes(specs, max_model_len),
        full_bytes=sequence_bytes(_all_full(request, model), max_model_len),
        paged_bytes=paged_bytes(specs, max_model_len),
        alignment_loss=sizing.alignment_loss,
        alternatives=tuple(_alternatives(request, model, max_model_len)),
        notes=tuple(notes),
    )


# ---- what the configuration says ----


def _read_config(name: str, revision: str | None, notes: list[str]) -> _Config:
    """Read the layers as the engine does, or where no family can, from the generic fields; and say so."""
    raw = read_config(name, revision)
    names = raw.get("architectures")
    if isinstance(names, list) and not FAMILIES.keys().isdisjoint(map(str, names)):
        try:
            spec = build(raw)[0]
            return _Config(raw, layout_of(spec), "family", spec.vocab_size)
        except UnsupportedModel as error:
            refusal = str(error)
    else:
        refusal = f"no family implements {_architecture(raw)}"
    notes.append(
        f"The engine does not run this model ({refusal}): its sizes are read from the generic fields of config.json."
    )
    layout, fields = read_layout(raw), text_fields(raw)
    return _Config(raw, layout, "generic fields", fields.integer("vocab_size") if fields.has("vocab_size") else None)


def _read_draft(config: EngineConfig, target: _Config, notes: list[str]) -> _Config | None:
    """Read the draft model, where one guesses, and see that it can."""
    name = config.speculative.draft_model
    if name is None:
        return None
    own_notes: list[str] = []
    draft = _read_config(name, None, own_notes)
    notes += [f"Draft model: {note}" for note in own_notes]
    check_draft(config, target.limits, draft.limits)
    return draft


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(raw.get("model_type", "unknown"))


def _dtype(option: str, raw: Mapping[str, Any], notes: list[str]) -> str:
    """Return the dtype of the weights, as the engine chooses it as far as that is possible without them."""
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


def _weights_bytes(request: PlanRequest, models: Sequence[_Config], dtype: str, notes: list[str]) -> int | None:
    """Return what the weights of all models take of the machine's memory; None where nobody asks."""
    if request.memory_bytes is None:
        return None
    weights_bytes = request.weights_bytes
    if weights_bytes is None:
        # A draft model is loaded in the dtype of its target.
        options = CACHE_DTYPES[dtype].element_bytes, request.config.model.quantization
        weights_bytes = sum(estimate_parameters(each.raw).num_bytes(*options) for each in models)
        if any(each.raw.get("quantization_config") for each in models):
            notes.append(f"The weights are quantised, and are counted in {dtype}: set --weights-bytes to their size.")
    if weights_bytes >= request.memory_bytes:
        raise ConfigError(
            f"memory ({request.memory_bytes:,} bytes) does not hold the weights ({weights_bytes:,} bytes): give more, "
            "or state with weights_bytes what they really take",
            field="memory",
        )
    return weights_bytes


# ---- how large everything is ----


def _size(request: PlanRequest, model: _Model) -> ArenaSizing:
    """Return the arena that an engine with these options would have; of no bytes without a budget."""
    config = request.config
    specs = _specs(request, model)
    if not request.has_budget:
        return ArenaSizing.of(specs, 0)
    cache = config.cache
    if request.memory_bytes is None:
        available_bytes = cache.kv_cache_memory_bytes or 0
    else:
        available_bytes = request.memory_bytes - (model.weights_bytes or 0)
    max_model_len = context_length(config.model.max_model_len, model.max_position)
    num_blocks, _ = pool_blocks(
        cache,
        Machine(device="cpu", available_bytes=available_bytes, num_threads=1),
        tokens_bytes(specs),
        max_model_len,
        config.scheduler.max_num_seqs,
        most_bytes(specs, max_model_len, config.scheduler.max_num_seqs, cache.state_snapshot_interval),
    )
    return size_pool(specs, num_blocks)


def _specs(request: PlanRequest, model: _Model) -> tuple[KVCacheSpec, ...]:
    input_bytes = CACHE_DTYPES[model.dtype].element_bytes
    stored = CACHE_DTYPES[_kv_cache_dtype(request, model)]
    sizes = request.config.cache.block_size, stored, input_bytes
    return tuple(spec for layout in model.layouts for spec in layout.specs(*sizes))


def _kv_cache_dtype(request: PlanRequest, model: _Model) -> str:
    asked = request.config.cache.kv_cache_dtype
    return model.dtype if asked == "auto" else asked


def _all_full(request: PlanRequest, model: _Model) -> tuple[KVCacheSpec, ...]:
    """Return the specs that the layers would have without windows and chunks."""
    layouts = [
        replace(
            layout,
            attention=tuple((layer._replace(window=None, chunk=None), count) for layer, count in layout.attention),
        )
        for layout in model.layouts
    ]
    return _specs(request, replace(model, layouts=tuple(layouts)))


def _bytes_per_token(sizing: ArenaSizing) -> int:
    return tokens_bytes(sizing.specs) // sizing.specs[0].block_size


def _group_plans(request: PlanRequest, model: _Model, sizing: ArenaSizing) -> Iterator[GroupPlan]:
    counts: Sequence[int | None] = sizing.num_blocks if request.has_budget else (None,) * len(sizing.num_blocks)
    for (layer, num_layers, is_draft), spec, count in zip(model.layers, sizing.specs, counts, strict=True):
        size = spec.bytes_per_block
        yield GroupPlan(
            kind=_kind(layer),
            is_draft=is_draft,
            num_layers=num_layers,
            bytes_per_token=None if spec.carries else size // spec.block_size,
            bytes_per_block=None if spec.carries else size,
            bytes_per_sequence=size if spec.carries else None,
            num_blocks=count,
        )


def _kind(layer: AttentionLayer | StateLayer) -> str:
    if isinstance(layer, StateLayer):
        return "recurrent state"
    if layer.window is not None:
        return f"window of {layer.window} tokens"
    return "all tokens" if layer.chunk is None else f"chunks of {layer.chunk} tokens"


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
        fit = memory_concurrency(request.config, sizing, num_tokens, _device(request))
        concurrency = min(fit, request.config.scheduler.max_num_seqs)
    return LengthPlan(
        num_tokens=num_tokens,
        sequence_bytes=sequence_bytes(sizing.specs, num_tokens),
        concurrency=concurrency,
    )


def _device(request: PlanRequest) -> str:
    """Return the device whose default tokens of a step count: the CPU unless a GPU is asked for."""
    return "cuda" if request.config.model.device == "cuda" else "cpu"


def _never(sizing: ArenaSizing, model: _Model, longest: int, max_model_len: int) -> str:
    """Say which prompts never fit, and why."""
    if longest == max_model_len:
        return f"Prompts of {max_model_len:,} tokens and more never fit: max_model_len leaves no room for a new token."
    shortage = sizing.shortage(longest + 1)
    assert shortage is not None
    of_all = tokens_bytes(sizing.specs)
    # What the engine gives the cache is whole blocks of every group.
    least = -(-sizing.bytes_for(max_model_len) // of_all) * of_all
    is_alone = len(sizing.specs) == 1
    layer, _, is_draft = model.layers[shortage.group_idx]
    most = "" if is_alone else f", most of them for {_kind(layer)!r}{' of the draft model' if is_draft else ''}"
    text = (
        f"Sequences of more than {longest:,} tokens, prompt and output together, never fit: {longest + 1:,} would need "
        f"{shortage.needed:,} {'blocks' if is_alone else 'slabs'} of {sizing.layout.slab_bytes:,} bytes{most}; there "
        f"are {shortage.available:,}. max_model_len={max_model_len} needs kv_cache_memory_bytes of at least {least}"
    )
    return text + (f", or lower max_model_len to {longest}." if longest else ".")


def _alternatives(request: PlanRequest, model: _Model, max_model_len: int) -> Iterator[Alternative]:
    """Yield what other values of one option would change."""
    for option, other in _other_requests(request, model, max_model_len):
        sizing = _size(other, model)
        limit = context_length(other.config.model.max_model_len, model.max_position)
        yield Alternative(
            option=option,
            bytes_per_token=_bytes_per_token(sizing),
            sequence=_length_plan(other, sizing, limit),
            longest=sizing.longest(limit) if other.has_budget else None,
        )


def _other_requests(request: PlanRequest, model: _Model, max_model_len: int) -> Iterator[tuple[str, PlanRequest]]:
    config = request.config
    cache = config.cache

    def with_cache(**changes: Any) -> PlanRequest:
        return replace(request, config=replace(config, cache=replace(cache, **changes)))

    for block_size in (cache.block_size // 2, cache.block_size * 2):
        if 1 <= block_size <= 1024:
            yield f"--block-size {block_size}", with_cache(block_size=block_size)
    now = sum(spec.bytes_per_block for spec in _specs(request, model))
    for name in CACHE_DTYPES:
        other = with_cache(kv_cache_dtype=name)
        if sum(spec.bytes_per_block for spec in _specs(other, model)) < now:
            yield f"--kv-cache-dtype {name}", other
    if max_model_len > 1:
        shorter = replace(config.model, max_model_len=max_model_len // 2)
        yield f"--max-model-len {max_model_len // 2}", replace(request, config=replace(config, model=shorter))
    is_share = request.memory_bytes is not None and cache.num_kv_blocks is None and cache.kv_cache_memory_bytes is None
    if is_share and cache.kv_cache_memory_fraction < GENEROUS_FRACTION:
        yield (
            f"--kv-cache-memory-fraction {GENEROUS_FRACTION}",
            with_cache(kv_cache_memory_fraction=GENEROUS_FRACTION),
        )
