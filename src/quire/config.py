"""Frozen, composed configuration, and the pure function that completes it.

`EngineConfig` is what a user asked for; `Machine` and `ModelFacts` are what was found; `resolve` turns the three into
a `ResolvedConfig` without looking at the world, so that the same inputs always give the same engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from quire.errors import ConfigError
from quire.facts import Machine, ModelFacts
from quire.option_checks import flag, one_of, share, text, whole

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "native", "torch")
EVICTION_POLICIES = ("lru", "fifo", "lfu", "slru")
POLICIES = ("fcfs", "priority")
PREEMPTION_POLICIES = ("last", "least_waste")
PREEMPTION_MODES = ("auto", "recompute", "swap")
DEFAULT_MEMORY_FRACTION = 0.5
GIB = 1 << 30
# Below so many parameters an operation is over before a second thread has woken up.
SMALL_MODEL_PARAMETERS = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded.

    Args:
        model: a local folder, a Hugging Face hub id, or "bundled" for the model that ships with Quire.
        tokenizer: the same for the tokenizer; None takes the model's.
        skip_tokenizer_init: work on token ids only.
        revision: a hub revision.
        dtype: of weights and KV cache; "auto" keeps the checkpoint's.
        device: "auto" takes a GPU when there is one.
        max_model_len: tokens of prompt and output together; None takes the model's own limit.
        served_model_name: the name that the server shows; None takes `model`.
        seed: where requests without a seed take theirs from.
        num_threads: threads of the data plane on a CPU; None takes all cores that this process may use, but one for
            a model so small that threads would wait for each other longer than they work.
        kernels: what computes between the matrix products: "native" kernels, compiled when Quire was installed, or
            stock "torch" operators; "auto" takes the former on a CPU where there are any.
    """

    model: str = "bundled"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    served_model_name: str | None = None
    seed: int = 0
    num_threads: int | None = None
    kernels: str = "auto"

    def __post_init__(self) -> None:
        text("model", self.model)
        for name in ("tokenizer", "revision", "served_model_name"):
            text(name, getattr(self, name), optional=True)
        flag("skip_tokenizer_init", self.skip_tokenizer_init)
        one_of("dtype", self.dtype, DTYPES)
        one_of("device", self.device, DEVICES)
        one_of("kernels", self.kernels, KERNELS)
        whole("max_model_len", self.max_model_len, 1, optional=True)
        whole("num_threads", self.num_threads, 1, optional=True)
        whole("seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much KV memory, and how it is cut.

    Args:
        block_size: tokens of a block.
        num_kv_blocks: the pool's size in usable blocks; overrides the budgets below.
        kv_cache_memory_bytes: the pool's size in bytes.
        kv_cache_memory_fraction: else, this share of the memory available once the weights are loaded.
        enable_prefix_caching: find and reuse published blocks.
        eviction_policy: which idle block is taken back first: "lru" (idle for longest), "fifo" (published first), "lfu"
            (used least often) or "slru" (first those that were never used again).
        watermark: share of the blocks kept free for growth when a sequence is admitted.
        swap_space: bytes of host memory for the blocks of sequences that lose theirs on the device; 0 for none.
        record_memory: a file, not there yet, for a log of every memory command; `quire replay` runs it again.
    """

    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_memory_fraction: float = DEFAULT_MEMORY_FRACTION
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"
    watermark: float = 0.01
    swap_space: int = 0
    record_memory: str | None = None

    def __post_init__(self) -> None:
        whole("block_size", self.block_size, 1, 1024)
        whole("num_kv_blocks", self.num_kv_blocks, 1, optional=True)
        whole("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, optional=True)
        flag("enable_prefix_caching", self.enable_prefix_caching)
        one_of("eviction_policy", self.eviction_policy, EVICTION_POLICIES)
        share("kv_cache_memory_fraction", self.kv_cache_memory_fraction, 1.0, positive=True)
        share("watermark", self.watermark, 0.5)
        whole("swap_space", self.swap_space, 0)
        text("record_memory", self.record_memory, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs in a step.

    Args:
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in a step; longer prompts are computed in chunks. None takes 512 on
            a CPU and 2048 on a GPU, and `max_num_seqs` at least.
        scheduling_policy: "fcfs", or "priority" (lower values first, then first come first served).
        preemption_policy: whose memory is taken when a running sequence lacks it: of those behind it in order, the
            "last", or "least_waste" (whose loss costs least time for what it frees).
        preemption_mode: how a sequence that lost its memory goes on: "recompute" its tokens, "swap" its blocks to
            `swap_space` and back, or "auto", the cheaper by what the engine measures.
        max_queue_len: requests that may wait; more are refused with `QueueFull`. None is unbounded (offline use).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    preemption_policy: str = "last"
    preemption_mode: str = "auto"
    max_queue_len: int | None = None

    def __post_init__(self) -> None:
        whole("max_num_seqs", self.max_num_seqs, 1)
        whole("max_num_batched_tokens", self.max_num_batched_tokens, 1, optional=True)
        one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        one_of("preemption_policy", self.preemption_policy, PREEMPTION_POLICIES)
        one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        whole("max_queue_len", self.max_queue_len, 1, optional=True)
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence decodes one token a step; raise the one or lower the other",
                field="max_num_batched_tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that a user can ask of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.scheduler.preemption_mode == "swap" and not self.cache.swap_space:
            raise ConfigError(
                "preemption_mode 'swap' needs swap_space, which is 0; set swap_space (a few GiB, say), or the mode to "
                "'auto' or 'recompute'",
                field="preemption_mode",
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Compose a configuration from flat options, as `LLM(...)` and the command line give them.

        Raises:
            ConfigError: an unknown option (the message lists the known ones), or a value that is not allowed.
        """
        parts: dict[str, dict[str, Any]] = {"model": {}, "cache": {}, "scheduler": {}}
        homes = option_homes()
        for name, value in options.items():
            if name not in homes:
                raise ConfigError(f"unknown option {name!r}; known options are {', '.join(sorted(homes))}", field=name)
            parts[homes[name]][name] = value
        return cls(
            model=ModelConfig(**parts["model"]),
            cache=CacheConfig(**parts["cache"]),
            scheduler=SchedulerConfig(**parts["scheduler"]),
        )


def option_homes() -> dict[str, str]:
    """Map each flat option's name to the part of `EngineConfig` that holds it."""
    homes: dict[str, str] = {}
    for part, cls in (("model", ModelConfig), ("cache", CacheConfig), ("scheduler", SchedulerConfig)):
        for item in fields(cls):
            homes[item.name] = part
    return homes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration with no open question; printed at start.

    Args:
        num_blocks: blocks of the pool, without the null block.
        bytes_per_block: KV bytes of one block of every cache group.
        longest_blocks: blocks that hold a sequence of `max_model_len` tokens.
    """

    device: str
    num_threads: int
    max_model_len: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    longest_blocks: int
    enable_prefix_caching: bool
    eviction_policy: str
    watermark_blocks: int
    swap_space: int
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str
    preemption_policy: str
    preemption_mode: str
    max_queue_len: int | None
    vocab_size: int
    seed: int
    kernels: str

    @property
    def kv_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Sequences of `max_model_len` tokens that fit at once."""
        return self.num_blocks / self.longest_blocks

    def lines(self) -> tuple[str, ...]:
        """Return the lines that people look for at start."""
        kv_bytes = self.num_blocks * self.bytes_per_block
        swap = (
            f"Swap space: {self.swap_space / GIB:.2f} GiB of host memory "
            f"({self.swap_space // self.bytes_per_block:,} blocks); preemption mode {self.preemption_mode}",
        )
        return (
            f"Available KV cache memory: {kv_bytes / GIB:.2f} GiB "
            f"({self.num_blocks:,} blocks of {self.block_size} tokens, {self.bytes_per_block:,} bytes each)",
            f"KV cache size: {self.kv_tokens:,} tokens, maximum concurrency for {self.max_model_len:,} tokens "
            f"per request: {self.max_concurrency:.2f}x",
            f"Scheduler: {self.scheduling_policy}, at most {self.max_num_seqs} sequences and "
            f"{self.max_num_batched_tokens} tokens a step; prefix caching "
            f"{'on' if self.enable_prefix_caching else 'off'}; device {self.device}, {self.num_threads} threads, "
            f"kernels: {self.kernels}",
            *(swap if self.swap_space else ()),
        )


def resolve(config: EngineConfig, machine: Machine, facts: ModelFacts) -> ResolvedConfig:
    """Complete a configuration with what was found; pure.

    Raises:
        ConfigError: `max_model_len` past the model's limit, more swap space than the host has memory, or a KV budget
            that cannot hold one sequence of `max_model_len` tokens; the message says which number to change, and to
            what.
    """
    cache, scheduler = config.cache, config.scheduler
    machine = machine.set_aside(cache.swap_space)
    max_model_len = context_length(config.model.max_model_len, facts.max_position)
    bytes_per_block = facts.bytes_per_token * cache.block_size
    num_blocks, origin = pool_blocks(cache, machine, bytes_per_block, max_model_len, scheduler.max_num_seqs)
    needed = -(-max_model_len // cache.block_size)
    if facts.longest_bytes is not None:
        needed = -(-facts.longest_bytes // bytes_per_block) - 1
    if num_blocks < needed:
        raise _too_few_blocks(cache, max_model_len, num_blocks, needed, bytes_per_block, origin)
    default_threads = 1 if facts.num_parameters < SMALL_MODEL_PARAMETERS else machine.num_threads
    default_budget = 512 if machine.device == "cpu" else 2048
    return ResolvedConfig(
        device=machine.device,
        num_threads=config.model.num_threads or default_threads,
        max_model_len=max_model_len,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        longest_blocks=needed,
        enable_prefix_caching=cache.enable_prefix_caching,
        eviction_policy=cache.eviction_policy,
        watermark_blocks=int(num_blocks * cache.watermark),
        swap_space=cache.swap_space,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens or max(default_budget, scheduler.max_num_seqs),
        scheduling_policy=scheduler.scheduling_policy,
        preemption_policy=scheduler.preemption_policy,
        preemption_mode=scheduler.preemption_mode,
        max_queue_len=scheduler.max_queue_len,
        vocab_size=facts.vocab_size,
        seed=config.model.seed,
        kernels=facts.kernels,
    )


def context_length(max_model_len: int | None, max_position: int) -> int:
    """Return the tokens that a sequence may have.

    Args:
        max_model_len: the option; None takes the model's limit.
        max_position: the model's limit.

    Raises:
        ConfigError: the option is past the model's limit.
    """
    if max_model_len is not None and max_model_len > max_position:
        raise ConfigError(
            f"max_model_len ({max_model_len}) is more than the model's limit of {max_position} tokens; "
            f"use at most {max_position}",
            field="max_model_len",
        )
    return max_model_len or max_position


def pool_blocks(
    cache: CacheConfig, machine: Machine, bytes_per_block: int, max_model_len: int, max_num_seqs: int
) -> tuple[int, str]:
    """Return the pool's size in blocks, at most 0 where there is room for none, and the words for where it comes from.

    Args:
        cache: what was asked for.
        machine: what there is.
        bytes_per_block: KV bytes of one block of every cache group.
        max_model_len, max_num_seqs: what can ever be used.

    Raises:
        ConfigError: more bytes are asked for than there are.
    """
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks, f"num_kv_blocks={cache.num_kv_blocks}"
    if cache.kv_cache_memory_bytes is not None:
        budget = cache.kv_cache_memory_bytes
        if budget > machine.available_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes ({budget:,}) is more than the {machine.available_bytes:,} bytes available "
                f"once the weights are loaded{_beside(cache)}; ask for less",
                field="kv_cache_memory_bytes",
            )
        # The null block costs one block of the budget.
        return budget // bytes_per_block - 1, f"kv_cache_memory_bytes={budget}"
    budget = int(machine.available_bytes * cache.kv_cache_memory_fraction)
    # More than every sequence at full length can never be used.
    most = -(-max_model_len // cache.block_size) * max_num_seqs
    words = f"{cache.kv_cache_memory_fraction:g} of the {machine.available_bytes:,} available bytes"
    return min(budget // bytes_per_block - 1, most), words


def _beside(cache: CacheConfig) -> str:
    return f" and {cache.swap_space:,} are set aside for swap_space" if cache.swap_space else ""


def _too_few_blocks(
    cache: CacheConfig, max_model_len: int, num_blocks: int, needed: int, bytes_per_block: int, origin: str
) -> ConfigError:
    """Return the error for a pool that cannot hold one sequence, with the numbers that would do."""
    if cache.num_kv_blocks is not None:
        field_to_raise, least = "num_kv_blocks", needed
    else:
        # One block more: the null block is paid for from the same bytes.
        field_to_raise, least = "kv_cache_memory_bytes", (needed + 1) * bytes_per_block
    advice = f"set {field_to_raise} to at least {least}"
    if num_blocks > 0:
        advice += f", or max_model_len to at most {num_blocks * cache.block_size}"
    return ConfigError(
        f"{origin} gives {max(num_blocks, 0)} KV blocks, but one sequence of max_model_len={max_model_len} tokens "
        f"needs {needed} blocks of {bytes_per_block:,} bytes: {advice}",
        field=field_to_raise,
    )
