"""The resolved configuration, and the pure function that computes it.

`EngineConfig` has the user's options; `Machine` and `ModelFacts` have the properties of machine and model. `resolve`
combines the three into a `ResolvedConfig` without other inputs, so the same arguments always give the same engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.async_scheduling import is_async
from quire.config.cache import CacheConfig
from quire.config.kv_transfer import KVTransferConfig
from quire.config.options import EngineConfig, Quantization, SchedulerConfig
from quire.config.parallel import ParallelConfig
from quire.config.probed import Machine, ModelFacts, StepCost
from quire.errors import ConfigError, InvalidParameter

GIB = 1 << 30
MAX_PRIORITY = 2**31 - 1
# Models with fewer parameters use one thread: an operation ends before a second thread has started.
SMALL_MODEL_PARAMETERS = 20_000_000
# Share of a GPU's memory that adapters leave free: for memory that the allocator cannot use, and other processes.
ADAPTER_HEADROOM = 0.02
NO_KERNELS = (
    "No native kernels: stock operators compute, at about a quarter of the speed. Install a C++ compiler, then Quire "
    "again; `quire doctor` says more"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A complete configuration; logged at start. The options of the same name are described in `EngineConfig`.

    Args:
        num_blocks: number of blocks of the pool, without the null block.
        bytes_per_block: KV bytes of one block of every cache group.
        longest_blocks: number of blocks that a sequence of `max_model_len` tokens needs.
        max_concurrency: number of sequences of `max_model_len` tokens that can run at once.
        watermark: share of the KV memory that an admission leaves free while there are other sequences.
        pin_limit, retention_limit: shares of the KV memory for pinned prefixes, and for blocks with `retain_cache`.
        kv_cache_metrics_sample: share of the blocks whose lifetime, idle time and reuse are measured.
        state_snapshot_interval: interval in tokens; None for the memory manager's default.
        swap_blocks: number of blocks of the swap space, as `HostUsage` counts them.
        host_bytes: size of the host tier, for swapping and for transfers of blocks on disk.
        quantization: quantisation of linear layers while they are loaded, or None.
        kv_cache_dtype: dtype of the KV cache.
        speculative_method: method that proposes drafts.
        num_speculative_tokens: maximum number of drafts per sequence and step; 0 for none.
        lacks_kernels: True if stock operators are used on a CPU because there are no native kernels.
        fitted_from: longest context that the model supports, if `max_model_len` was limited by the memory instead;
            None if it was not.
        is_encoder, hosted: see `ModelFacts`.
        adapter_bytes: GPU memory for adapters that are loaded in addition to `lora_modules`; None for no limit.
        kv_transfer: options of KV transfer between engines, or None.
        cudagraph_capture_sizes: sizes of captured decode steps, in ascending order; none if all steps run eagerly.
        piecewise_cudagraph_capture_sizes: numbers of tokens of piecewise captured steps, in ascending order.
        async_scheduling: True if the next step is launched before the tokens of the current one are read.
    """

    device: str
    num_threads: int
    max_model_len: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    longest_blocks: int
    max_concurrency: int
    enable_prefix_caching: bool
    eviction_policy: str
    watermark: float
    swap_space: int
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str
    priority_aging: int
    preemption_policy: str
    preemption_mode: str
    max_queue_len: int | None
    vocab_size: int
    seed: int
    kernels: str
    pin_limit: float = 0.0
    retention_limit: float = 0.0
    kv_cache_metrics_sample: float = 0.0
    state_snapshot_interval: int | None = None
    host_bytes: int = 0
    swap_blocks: int = 0
    adapter_bytes: int | None = None
    max_inter_token_ms: float | None = None
    quantization: Quantization | None = None
    kv_cache_dtype: str = "bfloat16"
    speculative_method: str = "off"
    num_speculative_tokens: int = 0
    lacks_kernels: bool = False
    fitted_from: int | None = None
    is_encoder: bool = False
    hosted: tuple[str, ...] = ()
    kv_transfer: KVTransferConfig | None = None
    cudagraph_capture_sizes: tuple[int, ...] = ()
    piecewise_cudagraph_capture_sizes: tuple[int, ...] = ()
    async_scheduling: bool = False
    sanitize_control_tokens: str = "always"

    @property
    def max_prompt_len(self) -> int:
        """Maximum number of tokens of a prompt: a decoder leaves room for one more."""
        return self.max_model_len if self.is_encoder else self.max_model_len - 1

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    def check_priority(self, priority: object) -> None:
        """Check the priority of a request, which needs the scheduling policy "priority" unless it is 0."""
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            raise InvalidParameter("priority", priority, f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}")
        if priority and self.scheduling_policy != "priority":
            raise InvalidParameter("priority", priority, f"0 under the scheduling policy {self.scheduling_policy!r}")

    @property
    def model_impl(self) -> str:
        """Implementation of the model: "native" or "transformers"."""
        return "transformers" if self.hosted else "native"

    def notices(self) -> tuple[str, ...]:
        """Return the lines of `lines` that may require an action of the user."""
        fitted = (
            f"Context: {self.max_model_len:,} of the model's {self.fitted_from or 0:,} tokens fit into this memory; "
            "max_model_len (--max-model-len) sets another length",
        )
        return (*(fitted if self.fitted_from else ()), *((NO_KERNELS,) if self.lacks_kernels else ()))

    def lines(self) -> tuple[str, ...]:
        """Return the lines that are logged at start."""
        kv_bytes = self.num_blocks * self.bytes_per_block
        swap = (
            f"Swap space: {self.swap_space / GIB:.2f} GiB of host memory "
            f"({self.swap_blocks:,} blocks); preemption mode {self.preemption_mode}",
        )
        drafts = (
            f"Speculative decoding: {self.speculative_method}, at most {self.num_speculative_tokens} tokens of a "
            "sequence in a step",
        )
        cache: tuple[str, ...] = (
            f"Available KV cache memory: {kv_bytes / GIB:.2f} GiB "
            f"({self.num_blocks:,} blocks of {self.block_size} tokens in {self.kv_cache_dtype}, "
            f"{self.bytes_per_block:,} bytes each)",
            f"KV cache size: {self.kv_tokens:,} tokens, maximum concurrency for {self.max_model_len:,} tokens "
            f"per request: {self.max_concurrency:,}x",
        )
        if self.is_encoder:
            cache = (f"Encoder without a KV cache: prompts of up to {self.max_model_len:,} tokens, each in one step",)
        is_drafting = self.num_speculative_tokens > 0
        behind = "while the one before it runs"
        if self.speculative_method in ("draft", "mtp"):
            behind = "before outputs are made of the last one"
        elif is_drafting:
            behind += ", or before outputs are made of that one where either may have drafts"
        return (
            *cache,
            f"Scheduler: {self.scheduling_policy}, at most {self.max_num_seqs} sequences and "
            f"{self.max_num_batched_tokens} tokens a step; prefix caching "
            f"{'on' if self.enable_prefix_caching else 'off'}; device {self.device}, {self.num_threads} threads, "
            f"kernels: {self.kernels}" + (f", weights: {self.quantization}" if self.quantization else ""),
            *self.notices(),
            *self.hosted,
            *(swap if self.swap_space else ()),
            *(drafts if is_drafting else ()),
            *(() if self.adapter_bytes is None else (f"Memory for more adapters: {self.adapter_bytes / GIB:.2f} GiB",)),
            *((f"Asynchronous scheduling: a step is launched {behind}",) * self.async_scheduling),
        )


def resolve(config: EngineConfig, machine: Machine, facts: ModelFacts) -> ResolvedConfig:
    """Return the complete configuration."""
    cache, scheduler = config.cache, config.scheduler
    machine = machine.set_aside(cache.host_bytes, cache.host_option)
    max_model_len = context_length(config.model.max_model_len, facts.max_position)
    bytes_per_block = facts.bytes_per_token * cache.block_size
    num_blocks, needed = sufficient_blocks(
        *(cache, machine, bytes_per_block, max_model_len, scheduler.max_num_seqs),
        *(facts.most_bytes, facts.longest_bytes, facts.step),
    )
    concurrency = num_blocks // needed if facts.concurrency is None else facts.concurrency(num_blocks)
    default_threads = 1 if facts.num_parameters < SMALL_MODEL_PARAMETERS else machine.num_threads
    return ResolvedConfig(
        device=machine.device,
        num_threads=config.model.num_threads or default_threads,
        max_model_len=max_model_len,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        kv_cache_dtype=facts.dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype,
        longest_blocks=needed,
        max_concurrency=min(concurrency, scheduler.max_num_seqs),
        enable_prefix_caching=cache.enable_prefix_caching,
        eviction_policy=cache.eviction_policy,
        watermark=cache.watermark,
        swap_space=cache.swap_space,
        swap_blocks=facts.host_blocks(cache.swap_space) if facts.host_blocks else cache.swap_space // bytes_per_block,
        host_bytes=cache.host_bytes,
        adapter_bytes=_adapter_bytes(config, machine, num_blocks, bytes_per_block, facts.step),
        kv_transfer=cache.transfer,
        cudagraph_capture_sizes=() if facts.hosted else capture_sizes(config, machine.device),
        piecewise_cudagraph_capture_sizes=() if facts.hosted else piece_sizes(config, machine.device),
        async_scheduling=is_async(config.to_options(), machine.device, is_encoder=facts.is_encoder),
        sanitize_control_tokens=config.model.sanitize_control_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=step_tokens(scheduler, machine.device),
        scheduling_policy=scheduler.scheduling_policy,
        priority_aging=scheduler.priority_aging,
        preemption_policy=scheduler.preemption_policy,
        preemption_mode=scheduler.preemption_mode,
        max_queue_len=scheduler.max_queue_len,
        max_inter_token_ms=scheduler.max_inter_token_ms,
        vocab_size=facts.vocab_size,
        seed=config.model.seed,
        kernels=facts.kernels,
        lacks_kernels=machine.device == "cpu" and config.model.kernels == "auto" and facts.kernels.startswith("torch"),
        quantization=config.model.quantization,
        pin_limit=cache.pin_limit,
        retention_limit=cache.retention_limit,
        kv_cache_metrics_sample=cache.kv_cache_metrics_sample,
        state_snapshot_interval=cache.state_snapshot_interval,
        speculative_method=config.speculative.speculative_method,
        num_speculative_tokens=config.speculative.num_tokens,
        is_encoder=facts.is_encoder,
        hosted=facts.hosted,
    )


def capture_sizes(config: EngineConfig, device: str) -> tuple[int, ...]:
    """Return the sizes of captured decode steps, in ascending order; none if no step can be captured."""
    if not _can_capture(config.parallel, device):
        return ()
    most = config.scheduler.max_num_seqs * (1 + config.speculative.num_tokens)
    return config.graphs.sizes(config.model.kernels, device, most)


def piece_sizes(config: EngineConfig, device: str) -> tuple[int, ...]:
    """Return the numbers of tokens of piecewise captured steps, in ascending order; none if no step can be captured."""
    if not _can_capture(config.parallel, device):
        return ()
    return config.graphs.piece_sizes(device, step_tokens(config.scheduler, device))


def _can_capture(parallel: ParallelConfig, device: str) -> bool:
    """Return whether steps can be captured: not with pipeline stages, nor with several GPUs without NCCL."""
    is_staged = device == "cuda" and parallel.all_reduce_backend not in ("auto", "nccl")
    return parallel.pipeline_parallel_size == 1 and not (parallel.tensor_parallel_size > 1 and is_staged)


def step_tokens(scheduler: SchedulerConfig, device: str) -> int:
    """Return the token budget of a step on a device, "cpu" or "cuda"."""
    # A small step would take a GPU less time than its host needs to launch it.
    default = 512 if device == "cpu" else 8192
    return scheduler.max_num_batched_tokens or max(default, scheduler.max_num_seqs)


def context_length(max_model_len: int | None, max_position: int) -> int:
    """Return the maximum number of tokens of a sequence."""
    if max_model_len is not None and max_model_len > max_position:
        raise ConfigError(
            f"max_model_len ({max_model_len}) is more than the model's limit of {max_position} tokens; "
            f"use at most {max_position}",
            field="max_model_len",
        )
    return max_model_len or max_position


def pool_blocks(
    cache: CacheConfig,
    machine: Machine,
    bytes_per_block: int,
    max_model_len: int,
    max_num_seqs: int,
    most_bytes: int | None = None,
    step: StepCost | None = None,
) -> tuple[int, str]:
    """Return the size of the pool in blocks, 0 or less if none fits, and a description of the options it comes from."""
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks, f"num_kv_blocks={cache.num_kv_blocks}"
    step = step or StepCost()
    if cache.kv_cache_memory_bytes is not None:
        budget = cache.kv_cache_memory_bytes
        if budget > machine.available_bytes - step.image_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes ({budget:,}) is more than the {machine.available_bytes:,} bytes "
                f"available{_reserved(cache, step)}; set a smaller value",
                field="kv_cache_memory_bytes",
            )
        # The null block costs one block of the budget.
        return budget // bytes_per_block - 1, f"kv_cache_memory_bytes={budget}"
    # More blocks than all sequences use at full length would have no effect.
    most = -(-max_model_len // cache.block_size) * max_num_seqs
    if most_bytes is not None:
        most = -(-most_bytes // bytes_per_block) - 1
    if machine.total_bytes is not None:
        taken_bytes = machine.total_bytes - machine.available_bytes + step.fixed_bytes + step.image_bytes
        budget = int(machine.total_bytes * cache.gpu_memory_utilization) - taken_bytes
        words = (
            f"{cache.gpu_memory_utilization:g} of the GPU's {machine.total_bytes:,} bytes, of which the weights, other "
            f"processes and the largest step{' and image' * (step.image_bytes > 0)} take {taken_bytes:,},"
        )
        return min(budget // (bytes_per_block + step.bytes_per_token * cache.block_size) - 1, most), words
    budget = int(machine.available_bytes * cache.kv_cache_memory_fraction)
    words = f"{cache.kv_cache_memory_fraction:g} of the {machine.available_bytes:,} available bytes"
    if budget > machine.available_bytes - step.image_bytes:
        budget = machine.available_bytes - step.image_bytes
        words = f"all of the {machine.available_bytes:,} available bytes{_reserved(cache, step)}"
    return min(budget // bytes_per_block - 1, most), words


def sufficient_blocks(
    cache: CacheConfig,
    machine: Machine,
    bytes_per_block: int,
    max_model_len: int,
    max_num_seqs: int,
    most_bytes: int | None,
    longest_bytes: int | None,
    step: StepCost,
) -> tuple[int, int]:
    """Return the size of the pool in blocks, and the blocks of one sequence of `max_model_len` tokens.

    Raises:
        ConfigError: the pool cannot hold one such sequence, or exceeds the memory; the message has what would suffice.
    """
    num_blocks, origin = pool_blocks(cache, machine, bytes_per_block, max_model_len, max_num_seqs, most_bytes, step)
    blocks_of_tokens = -(-max_model_len // cache.block_size)
    needed = blocks_of_tokens if longest_bytes is None else -(-longest_bytes // bytes_per_block) - 1
    if num_blocks < needed:
        raise _too_few_blocks(cache, max_model_len, num_blocks, needed, bytes_per_block, origin, most_bytes is not None)
    return num_blocks, needed


def _adapter_bytes(
    config: EngineConfig, machine: Machine, num_blocks: int, bytes_per_block: int, step: StepCost
) -> int | None:
    """Return the number of bytes of GPU memory that adapters may take; None without adapters or on a CPU."""
    if machine.total_bytes is None or not config.lora.enable_lora:
        return None
    pool_bytes = (num_blocks + 1) * (bytes_per_block + step.bytes_per_token * config.cache.block_size)
    spare = int(machine.total_bytes * ADAPTER_HEADROOM)
    return max(0, machine.available_bytes - step.fixed_bytes - step.image_bytes - pool_bytes - spare)


def _reserved(cache: CacheConfig, step: StepCost) -> str:
    """Return words about what is set aside; "" for nothing. Only the images' part is left in the available bytes."""
    host = f" where {cache.host_bytes:,} are set aside for {cache.host_option}" if cache.host_bytes else ""
    if not step.image_bytes:
        return host
    fewer = "fewer with a smaller max_pixels in mm_processor_kwargs, none with language_model_only"
    return f"{host} but {step.image_bytes:,} for images ({fewer})"


def _too_few_blocks(
    cache: CacheConfig,
    max_model_len: int,
    num_blocks: int,
    needed: int,
    bytes_per_block: int,
    origin: str,
    has_states: bool,
) -> ConfigError:
    """Return the error for a pool that cannot hold one sequence, with the values that would suffice."""
    if cache.num_kv_blocks is not None:
        field_to_raise, least = "num_kv_blocks", f"{needed}"
    else:
        # One block more, since the null block comes from the same bytes.
        field_to_raise, least = "kv_cache_memory_bytes", f"{(needed + 1) * bytes_per_block} bytes"
    advice = f"set {field_to_raise} to at least {least}"
    if num_blocks > 0 and not has_states:  # a recurrent state is as large for a short sequence
        advice += f", or max_model_len to at most {num_blocks * cache.block_size}"
    return ConfigError(
        f"{origin} gives {max(num_blocks, 0)} KV blocks, but one sequence of max_model_len={max_model_len} tokens "
        f"needs {needed} blocks of {bytes_per_block:,} bytes: {advice}",
        field=field_to_raise,
    )
