"""Engines to simulate, from a model's configuration and named hardware, or from a file with measured step times."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quire.config import CACHE_DTYPES, DTYPES, CacheDtype, EngineConfig, context_length, step_tokens
from quire.errors import ConfigError, shown
from quire.measurement.bench.hardware import HARDWARE, Hardware, RooflineStepTime
from quire.measurement.bench.roofline import ModelShape
from quire.measurement.simulation.replicas.fit import FitQuality
from quire.measurement.simulation.replicas.replica_settings import ReplicaSettings
from quire.measurement.simulation.replicas.step_time import FittedStepTime, StepTimeModel
from quire.memory.capacity.sizing import ArenaSizing, arena_bytes, least_host_bytes, most_bytes, tokens_bytes
from quire.memory.recording.settings import MemorySettings
from quire.memory.specs import KVCacheSpec
from quire.models.capacity.gpu_budget import plan_gpu
from quire.models.capacity.pool_sizing import num_kept_free
from quire.models.checkpoints.checkpoint import find_gguf, read_config
from quire.models.families.quantization_config import check_stored_method
from quire.models.hosted.choice import read_decoder
from quire.models.specs.cache_layout import cache_specs
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.parameter_estimate import weight_bytes
from quire.models.specs.spec import ModelSpec
from quire.platform.bounded.files import reason_of

VERSION = 1
MAX_FILE_BYTES = 1 << 24
MAX_COUNT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """The parts of an engine that are fixed in a comparison of options.

    Args:
        name: description of the model and of the machine.
        step_time: model of the seconds of a step.
        specs: function from the number of tokens of a block to the cache specs.
        num_bytes: bytes of the KV memory, unless an option sets them.
        defaults: defaults of options that differ from `EngineConfig`.
        device: "cpu" or "cuda", which determines the default token budget of a step.
        max_model_len: maximum number of tokens of prompt and output; None if only memory limits it.
        fit: errors of fitted step times; None for a roofline, and for a file without them.
    """

    name: str
    step_time: StepTimeModel
    specs: Callable[[int], tuple[KVCacheSpec, ...]]
    num_bytes: int
    defaults: Mapping[str, Any]
    device: str
    max_model_len: int | None = None
    fit: FitQuality | None = None

    def settings(self, options: Mapping[str, Any]) -> ReplicaSettings:
        """Return the settings of a replica.

        Args:
            options: options for `EngineConfig.from_options`.

        Raises:
            ConfigError: an option is not allowed, or the KV memory holds no block.
        """
        config = EngineConfig.from_options(**{**self.defaults, **options})
        cache, scheduler = config.cache, config.scheduler
        specs = self.specs(cache.block_size)
        block_bytes = tokens_bytes(specs)
        num_bytes = self.num_bytes if cache.kv_cache_memory_bytes is None else cache.kv_cache_memory_bytes
        if self.max_model_len is not None:
            # More memory than all sequences use at full length would have no effect.
            most = -(-self.max_model_len // cache.block_size) * scheduler.max_num_seqs
            usable = most_bytes(specs, self.max_model_len, scheduler.max_num_seqs, cache.state_snapshot_interval)
            num_bytes = min(num_bytes, (most + 1) * block_bytes if usable is None else usable)
        num_blocks = cache.num_kv_blocks or num_bytes // block_bytes - 1
        if num_blocks < 1:
            raise ConfigError(
                f"the KV memory ({num_bytes:,} bytes) holds no block of {block_bytes:,} bytes: give more with "
                "kv_cache_memory_bytes or num_kv_blocks",
                field="kv_cache_memory_bytes",
            )
        if 0 < cache.swap_space < (least := least_host_bytes(specs)):
            raise ConfigError(
                f"swap_space ({cache.swap_space:,}) must be 0, or at least {least:,}: a block of every cache group",
                field="swap_space",
            )
        sizing = ArenaSizing.of(specs, arena_bytes(specs, num_blocks))
        memory = MemorySettings(
            specs=specs,
            num_bytes=sizing.num_bytes,
            watermark=num_kept_free(sizing, cache.watermark),
            enable_prefix_caching=cache.enable_prefix_caching,
            eviction=cache.eviction_policy,
            snapshot_interval=cache.state_snapshot_interval,
            host_bytes=cache.swap_space,
        )
        return ReplicaSettings(
            memory=memory,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=step_tokens(scheduler, self.device),
            policy=scheduler.scheduling_policy,
            priority_aging=scheduler.priority_aging,
            preemption_policy=scheduler.preemption_policy,
            preemption_mode=scheduler.preemption_mode if cache.swap_space else "recompute",
        )


def engine_on_hardware(options: Mapping[str, Any], hardware: str, count: int = 1) -> SimulatedEngine:
    """Return the engine of a model on named hardware, from the model's `config.json` and a roofline.

    Args:
        options: options of the engine, including the model.
        hardware: name in `HARDWARE`.
        count: number of such machines per replica.

    Raises:
        ConfigError: the model cannot be read, or its weights and steps do not fit.
    """
    if hardware not in HARDWARE:
        raise ConfigError(f"hardware must be one of {', '.join(HARDWARE)}, got {shown(hardware)}", field="hardware")
    if not 1 <= count <= MAX_COUNT:
        raise ConfigError(f"gpus must be a whole number from 1 to {MAX_COUNT}, got {count}", field="gpus")
    machine: Hardware = HARDWARE[hardware]
    config = EngineConfig.from_options(**options)
    spec, element_bytes, cache_dtype, shape = _dimensions(config)
    max_model_len = context_length(config.model.max_model_len, spec.max_position)
    weights_bytes, step_bytes = weight_bytes(spec, element_bytes, config.model.quantization, machine.device), 0
    if machine.device == "cuda":
        gpu = plan_gpu(config, [spec], max_model_len, element_bytes, int(machine.memory_bytes))
        step_bytes = count * (gpu.step_bytes + gpu.graph_bytes)
    left = int(count * machine.memory_bytes * config.cache.gpu_memory_utilization) - weights_bytes - step_bytes
    if left <= 0 and config.cache.num_kv_blocks is None and config.cache.kv_cache_memory_bytes is None:
        raise ConfigError(
            f"the weights ({weights_bytes:,} bytes) and steps ({step_bytes:,}) leave no memory of {count} {hardware} "
            f"({machine.memory_bytes:,.0f} bytes each, gpu_memory_utilization "
            f"{config.cache.gpu_memory_utilization:g}): give more with gpus",
            field="gpus",
        )
    name = f"{config.model.model} on {'' if count == 1 else f'{count} x '}{hardware}, by a roofline"
    return SimulatedEngine(
        name=name,
        step_time=RooflineStepTime(shape, machine, count),
        specs=lambda block_size: cache_specs(spec, block_size, cache_dtype, element_bytes),
        num_bytes=left,
        defaults={},
        device=machine.device,
        max_model_len=max_model_len,
    )


def roofline_of(config: EngineConfig, hardware: str, count: int = 1) -> RooflineStepTime:
    """Return the step time model of a model on named hardware; see `engine_on_hardware`."""
    return RooflineStepTime(_dimensions(config).shape, HARDWARE[hardware], count)


class _Dimensions(NamedTuple):
    """The dimensions of a model, from its configuration and the options.

    Args:
        spec: specification of the model.
        element_bytes: bytes of an element of the weights.
        cache_dtype: dtype of the KV cache.
        shape: dimensions for the roofline.
    """

    spec: ModelSpec | HostedSpec
    element_bytes: int
    cache_dtype: CacheDtype
    shape: ModelShape


def _dimensions(config: EngineConfig) -> _Dimensions:
    raw = read_config(config.model.model, config.model.revision)
    is_gguf = find_gguf(config.model.model, config.model.revision) is not None
    check_stored_method(config.model.stored_quantization, raw, is_gguf=is_gguf)
    spec = read_decoder(raw, config.model.model_impl).spec
    dtype = _dtype(config.model.dtype, raw)
    cached = dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    element_bytes, cache_dtype = CACHE_DTYPES[dtype].element_bytes, CACHE_DTYPES[cached]
    shape = ModelShape.estimate(spec, element_bytes, config.model.quantization, cache_dtype.element_bytes)
    return _Dimensions(spec, element_bytes, cache_dtype, shape)


def _dtype(option: str, raw: Mapping[str, Any]) -> str:
    """Return the dtype of the weights; bfloat16 if the configuration states none."""
    if option != "auto":
        return option
    part = raw.get("text_config")
    homes = [raw, part] if isinstance(part, Mapping) else [raw]
    stated = next((home[name] for home in homes for name in ("dtype", "torch_dtype") if home.get(name)), "bfloat16")
    return str(stated) if stated in DTYPES[1:] else "bfloat16"


def step_times_json(
    name: str, step_time: FittedStepTime, fit: Mapping[str, Any], engine: Mapping[str, Any], memory: MemorySettings
) -> str:
    """Return the content of a file for `engine_of_step_times`."""
    values = {
        "version": VERSION,
        "name": name,
        "coefficients": step_time.as_json(),
        "fit": dict(fit),
        "engine": dict(engine),
        "memory": json.loads(memory.to_json()),
    }
    return json.dumps(values, indent=2) + "\n"


def engine_of_step_times(path: str) -> SimulatedEngine:
    """Return the engine of a file of measured step times.

    Raises:
        ConfigError: the file cannot be read, or is invalid; the message names the field.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"step_times {path} cannot be read: {reason_of(error)}", field="step_times") from error
    try:
        values = json.loads(text) if len(text) <= MAX_FILE_BYTES else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"step_times {path} is not JSON ({error})", field="step_times") from error
    kinds = {"version": int, "name": str, "coefficients": dict, "engine": dict, "memory": dict}
    if not isinstance(values, dict):
        raise ConfigError(
            f"step_times {path} must hold one object, of at most {MAX_FILE_BYTES:,} bytes", field="step_times"
        )
    for field, kind in kinds.items():
        if type(values.get(field)) is not kind:
            raise ConfigError(
                f"step_times {path}: {field} must be of type {kind.__name__}, got {shown(values.get(field))}",
                field=field,
            )
    if values["version"] != VERSION:
        raise ConfigError(
            f"step_times {path}: version must be {VERSION}, got {values['version']}: measure again", field="version"
        )
    try:
        memory = MemorySettings.from_json(json.dumps(values["memory"]))
        memory.build()
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"step_times {path}: memory: {error}", field="memory") from error
    EngineConfig.from_options(**values["engine"])
    fit = FitQuality.read(values["fit"]) if values.get("fit") else None

    def specs(block_size: int) -> tuple[KVCacheSpec, ...]:
        return tuple(replace(spec, block_size=block_size) for spec in memory.specs)  # type: ignore[type-var]

    num_bytes = memory.num_bytes or arena_bytes(memory.specs, memory.num_blocks or 0)
    return SimulatedEngine(
        name=values["name"],
        step_time=FittedStepTime(values["coefficients"]),
        specs=specs,
        num_bytes=num_bytes,
        defaults=values["engine"],
        device="cpu",
        fit=fit,
    )
