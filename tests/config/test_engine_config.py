"""Configuration: refused by name and number, or completed by a pure function."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire import config as config_module
from quire.config import (
    KV_CACHE_DTYPES,
    CacheConfig,
    EngineConfig,
    Machine,
    ModelConfig,
    ModelFacts,
    ResolvedConfig,
    SchedulerConfig,
    StepCost,
    option_sections,
    resolve,
)
from quire.errors import ConfigError
from quire.memory.pool import eviction as memory_eviction
from quire.scheduling import policies

CPU = Machine(device="cpu", available_bytes=1 << 30, num_threads=4)
FACTS = ModelFacts(max_position=2048, bytes_per_token=1024, vocab_size=500, num_parameters=10**9)


def refused(**options: Any) -> ConfigError:
    """Return the refusal of options, which names one of them."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**options)
    assert caught.value.field in options
    return caught.value


def resolved(machine: Machine = CPU, facts: ModelFacts = FACTS, **options: Any) -> ResolvedConfig:
    return resolve(EngineConfig.from_options(**options), machine, facts)


def test_the_eviction_policies_are_those_of_memory() -> None:
    """The configuration lies below memory, and so cannot ask it."""
    assert tuple(memory_eviction.EVICTION_POLICIES) == config_module.EVICTION_POLICIES


def test_the_preemption_policies_are_those_of_the_scheduler() -> None:
    assert tuple(policies.PREEMPTION_POLICIES) == config_module.PREEMPTION_POLICIES


# ---- options one by one ----

# What must be asked for beside an option, so that it means something.
NEEDED: dict[str, dict[str, Any]] = {
    "num_speculative_tokens": {"speculative_method": "ngram"},
    "prompt_lookup_min": {"speculative_method": "suffix"},
    "prompt_lookup_max": {"speculative_method": "ngram"},
    "suffix_cache_bytes": {"speculative_method": "suffix"},
    "draft_model": {"speculative_method": "draft"},
    "lora_modules": {"enable_lora": True},
    "prefix_cache_write_policy": {"prefix_cache_dir": "cache"},
}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("model", ["bundled", "some/folder"], ["", None, 3, True]),
        ("tokenizer", [None, "folder"], ["", 3]),
        ("revision", [None, "main"], ["", 3]),
        ("served_model_name", [None, "name", ("a", "b")], ["", 3, ("a", ""), [1]]),
        ("generation_config", ["auto", "vllm"], ["", "none"]),
        ("chat_template", [None, "file"], ["", 3]),
        ("record_memory", [None, "memory.log"], ["", 3]),
        ("prefix_cache_dir", [None, "cache"], ["", 3]),
        ("prefix_cache_disk_bytes", [1, 8 << 30], [0, None, 1.5, True]),
        ("prefix_cache_url", [None, "redis://host:1/0", "unix:///run/a"], ["", 3, "http://host"]),
        ("prefix_cache_timeout_s", [1, 0.1], [0, -1.0, math.inf, "1", True, None]),
        ("prefix_cache_ttl_s", [None, 1, 0.1], [0, -1.0, math.inf, "1", True]),
        ("prefix_cache_write_policy", [None, "write_back", "write_through"], ["", "through", 3]),
        ("kv_transfer_config", [None, '{"kv_role": "kv_both"}'], ["{", 3, "[]"]),
        ("skip_tokenizer_init", [True, False], [None, 0, "false"]),
        ("deterministic", [True, False], [None, 1, "yes"]),
        ("enable_prefix_caching", [True, False], [None, 1, "no"]),
        ("dtype", ["auto", "bfloat16", "float16", "float32"], ["fp8", "", None, 32]),
        ("kv_cache_dtype", [*KV_CACHE_DTYPES], ["int4", "fp16", "", None, 8]),
        ("device", ["auto", "cpu", "cuda"], ["tpu", "CPU", None]),
        ("kernels", ["auto", "native", "torch", "triton"], ["fast", "", None, 1]),
        ("quantization", [None, "int8", "int4"], ["int2", "", "none", 8]),
        ("weight_packing", ["auto", "plain", "lossless"], ["tight", "", None, 1]),
        ("classifier_from_token", [None, "no,yes"], ["yes", "", "a,b,c", 3]),
        ("eviction_policy", ["lru", "fifo", "lfu", "slru"], ["mru", "", None]),
        ("scheduling_policy", ["fcfs", "priority"], ["lifo", None]),
        ("priority_aging", [1, 100_000], [0, -1, 2.5, None, True]),
        ("preemption_policy", ["last", "least_waste"], ["first", "", None]),
        ("preemption_mode", ["auto", "recompute"], ["swap", "copy", None]),
        ("swap_space", [0, 4096, 1 << 40], [-1, None, 0.5, "4X", 4, 4095, True]),
        ("seed", [0, 2**63 - 1], [-1, None, 1.0, True]),
        ("max_model_len", [None, 1, 10**6], [0, -2, 1.5, "8", True]),
        ("num_threads", [None, 1], [0, "4", False]),
        ("block_size", [1, 16, 1024], [0, 1025, None, 16.0, True]),
        ("num_kv_blocks", [None, 1], [0, 1.0]),
        ("kv_cache_memory_bytes", [None, 1, 1 << 60], [0, "1Gi", 1e9]),
        ("kv_cache_memory_fraction", [1, 1.0, 0.001], [0, 0.0, 1.001, -0.1, math.nan, math.inf, None, "0.5", True]),
        ("gpu_memory_utilization", [1, 0.9, 0.001], [0, 1.001, -0.1, math.nan, None, "0.9", True]),
        ("state_snapshot_interval", [None, 16, 1024], [0, -16, 24, 16.0, "16", True]),
        ("watermark", [0, 0.0, 0.5], [0.501, -0.001, math.nan, None, "0"]),
        ("pin_limit", [0, 0.5, 0.9], [0.91, -0.001, math.nan, None, "0"]),
        ("retention_limit", [0, 0.5, 0.9], [0.91, -0.001, math.nan, None, "0"]),
        ("kv_cache_metrics_sample", [0, 0.5, 1.0], [1.01, -0.001, math.nan, None, "0"]),
        ("max_num_seqs", [1, 4096], [0, None, 2.0]),
        ("max_num_batched_tokens", [None, 256], [0, 255, "512"]),
        ("max_queue_len", [None, 1], [0, -1, 2.5]),
        ("max_inter_token_ms", [None, 50, 0.5], [0, -1.0, math.nan, math.inf, "50", True]),
        ("speculative_method", ["off", "ngram", "suffix"], ["eagle", "", None, True]),
        ("num_speculative_tokens", [None, 1, 32], [0, 33, 1.5, "8", True]),
        ("prompt_lookup_min", [None, 1, 64], [0, 65, 1.5, "2", True]),
        ("prompt_lookup_max", [None, 2, 64], [0, 1, 65, 1.5, "2", True]),
        ("suffix_cache_bytes", [None, 1 << 16, 1 << 40], [0, 65535, 1e9, "1Gi", True]),
        ("draft_model", ["some/folder"], [None, "", 3, True]),
        ("enable_lora", [True, False], [None, 1, "yes"]),
        ("lora_modules", [(), ("a=/b", "c=/d")], [None, 5, "=b", True]),
        ("merge_lora", [False], [None, 1, "yes"]),
        ("tensor_parallel_size", [1, 2, 64], [0, 65, None, "2", True]),
        ("all_reduce_backend", ["auto", "shared_memory", "gloo"], ["nccl", "", None]),
        ("distributed_timeout_s", [60, 0.5], [0, -1.0, math.inf, "60", None, True]),
        ("kv_events_config", [None], ["{", 3, "[]"]),
        ("kv_events_format", ["map", "array"], ["maps", "", None]),
        ("max_lora_rank", [1, 512], [0, 513, None, "8", True]),
        ("max_cpu_loras", [None, 1], [0, 1.5, "8", True]),
        ("grammar_timeout_s", [5, 0.1], [0, -1.0, math.nan, math.inf, "5", True, None]),
        ("grammar_memory_bytes", [1 << 24, 10**12], [0, (1 << 24) - 1, -1, 1e9, True, None]),
    ],
)
def test_an_option_is_taken_or_refused_by_name_and_value(name: str, good: list[Any], bad: list[Any]) -> None:
    home = option_sections()[name]
    for value in good:
        config = EngineConfig.from_options(**{name: value}, **NEEDED.get(name, {}))
        assert getattr(getattr(config, home), name) == value
    for value in bad:
        error = refused(**{name: value}, **NEEDED.get(name, {}))
        assert error.field == name
        assert name in str(error)
        assert str(value) in str(error), "the message shows what was given"


def test_a_prefix_cache_on_disk_needs_prefix_caching() -> None:
    with pytest.raises(ConfigError, match="needs enable_prefix_caching") as refused:
        EngineConfig.from_options(prefix_cache_dir="cache", enable_prefix_caching=False)
    assert refused.value.field == "prefix_cache_dir"


def test_every_option_is_tried_above() -> None:
    (mark,) = [
        mark for mark in test_an_option_is_taken_or_refused_by_name_and_value.pytestmark if mark.name == "parametrize"
    ]
    assert {row[0] for row in mark.args[1]} == option_sections().keys()


def test_an_unknown_option_lists_the_known_ones() -> None:
    error = refused(max_model_length=5)
    assert error.field == "max_model_length"
    for name in option_sections():
        assert name in str(error)


def test_a_budget_below_the_slots_names_both() -> None:
    error = refused(max_num_batched_tokens=100, max_num_seqs=101)
    assert error.field == "max_num_batched_tokens"
    assert {"100", "101"} <= set(re.findall(r"\d+", str(error)))
    assert EngineConfig.from_options(max_num_batched_tokens=100, max_num_seqs=100).scheduler.max_num_seqs == 100


def test_options_go_home_and_nothing_else_changes() -> None:
    options: dict[str, Any] = {"dtype": "float32", "block_size": 8, "max_num_seqs": 3, "max_queue_len": 7}
    config = EngineConfig.from_options(**options)
    assert config == EngineConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=3, max_queue_len=7),
    )
    assert EngineConfig.from_options() == EngineConfig()


# ---- resolve ----


def test_resolve_takes_what_was_found() -> None:
    config = resolved(kv_cache_memory_fraction=0.25)
    assert config == ResolvedConfig(
        device="cpu",
        num_threads=4,
        max_model_len=2048,
        block_size=16,
        num_blocks=(1 << 28) // (16 * 1024) - 1,
        bytes_per_block=16 * 1024,
        enable_prefix_caching=True,
        watermark=0.01,
        swap_space=0,
        max_num_seqs=256,
        max_num_batched_tokens=512,
        scheduling_policy="fcfs",
        priority_aging=256,
        max_queue_len=None,
        vocab_size=500,
        seed=0,
        eviction_policy="lru",
        preemption_policy="last",
        preemption_mode="auto",
        kernels="torch",
        lacks_kernels=True,
        longest_blocks=128,
        max_concurrency=127,
        pin_limit=0.0,
        retention_limit=0.25,
        kv_cache_metrics_sample=0.01,
        kv_cache_dtype="bfloat16",
    )
    assert (config.kv_tokens, config.max_concurrency) == (16383 * 16, 16383 // 128)


def test_resolve_keeps_what_was_asked_for() -> None:
    config = resolved(
        num_threads=2,
        max_model_len=100,
        block_size=32,
        num_kv_blocks=40,
        enable_prefix_caching=False,
        eviction_policy="slru",
        watermark=0.1,
        state_snapshot_interval=64,
        max_num_seqs=6,
        max_num_batched_tokens=7,
        scheduling_policy="priority",
        priority_aging=99,
        preemption_policy="least_waste",
        preemption_mode="swap",
        swap_space=1 << 20,
        max_queue_len=9,
        max_inter_token_ms=30.5,
        quantization="int8",
        seed=11,
        pin_limit=0.2,
        retention_limit=0.3,
        kv_cache_metrics_sample=0.4,
        kv_cache_dtype="int8",
        speculative_method="suffix",
        num_speculative_tokens=5,
    )
    assert dataclasses.astuple(config) == (
        *("cpu", 2, 100, 32, 40, 32768, 4, 6, False, "slru", 0.1, 1 << 20, 6, 7),
        *("priority", 99, "least_waste", "swap", 9, 500, 11, "torch", 0.2, 0.3, 0.4, 64, 1 << 20, 30.5, "int8", "int8"),
        *("suffix", 5, True, None, False, None),
    )
    assert config.max_concurrency == 6, "no more than max_num_seqs"


@pytest.mark.parametrize(
    ("device", "max_num_seqs", "budget"),
    [("cpu", 256, 512), ("cpu", 600, 600), ("cuda", 256, 2048), ("cuda", 3000, 3000)],
)
def test_the_default_budget(device: str, max_num_seqs: int, budget: int) -> None:
    machine = dataclasses.replace(CPU, device=device)
    assert resolved(machine, max_num_seqs=max_num_seqs).max_num_batched_tokens == budget


def test_the_pool_is_no_larger_than_can_ever_be_used() -> None:
    assert resolved(max_num_seqs=2, max_model_len=100).num_blocks == 2 * 7


def test_a_model_len_past_the_models_own_is_refused() -> None:
    assert resolved(max_model_len=2048).max_model_len == 2048
    with pytest.raises(ConfigError, match=r"max_model_len \(2049\) .* at most 2048") as caught:
        resolved(max_model_len=2049)
    assert caught.value.field == "max_model_len"


def test_more_bytes_than_there_are_are_refused() -> None:
    assert resolved(kv_cache_memory_bytes=1 << 30).num_blocks == (1 << 16) - 1
    with pytest.raises(ConfigError, match=r"1,073,741,825.* 1,073,741,824 bytes available") as caught:
        resolved(kv_cache_memory_bytes=(1 << 30) + 1)
    assert caught.value.field == "kv_cache_memory_bytes"


def test_swapping_needs_somewhere_to_swap_to() -> None:
    error = refused(preemption_mode="swap")
    assert "swap_space, which is 0" in str(error)
    assert EngineConfig.from_options(preemption_mode="swap", swap_space=4096).cache.swap_space == 4096


def test_swap_space_is_taken_off_the_memory_of_the_host() -> None:
    half = resolved(swap_space=1 << 29)
    assert half.num_blocks == (1 << 28) // half.bytes_per_block - 1
    with pytest.raises(ConfigError, match=r"swap_space \(1,073,741,825 .* 1,073,741,824 bytes") as caught:
        resolved(swap_space=(1 << 30) + 1)
    assert caught.value.field == "swap_space"
    with pytest.raises(ConfigError, match=r"536,870,912 bytes available .* 536,870,912 are set aside for swap_space"):
        resolved(swap_space=1 << 29, kv_cache_memory_bytes=(1 << 29) + 1)


def test_so_is_what_comes_from_disk_through_it() -> None:
    roomy = dataclasses.replace(CPU, available_bytes=(1 << 30) + (1 << 29))
    half = resolved(roomy, prefix_cache_dir="cache")
    assert (half.host_bytes, half.num_blocks) == (1 << 30, (1 << 28) // half.bytes_per_block - 1)
    assert resolved(prefix_cache_dir="cache", swap_space=1 << 20).host_bytes == 1 << 20
    with pytest.raises(ConfigError, match=r"prefix_cache_dir .* is more .*; set a smaller swap_space") as caught:
        resolved(dataclasses.replace(CPU, available_bytes=(1 << 30) - 1), prefix_cache_dir="cache")
    assert caught.value.field == "prefix_cache_dir"


def test_a_gpu_has_memory_of_its_own_beside_the_swap_space() -> None:
    gpu = dataclasses.replace(CPU, device="cuda", host_bytes=1 << 20)
    assert resolved(gpu, swap_space=1 << 20).num_blocks == resolved(gpu).num_blocks
    assert gpu.set_aside(1 << 10, "swap_space").host_bytes == (1 << 20) - (1 << 10)
    with pytest.raises(ConfigError, match=r"swap_space \(1,048,577 .*\) is more than the 1,048,576 bytes"):
        resolved(gpu, swap_space=(1 << 20) + 1)


@given(
    available=st.integers(0, 1 << 22),
    blocks=st.none() | st.integers(1, 200),
    memory_bytes=st.none() | st.integers(1, 1 << 22),
    max_model_len=st.integers(1, 2048),
    block_size=st.sampled_from([1, 7, 16, 128]),
)
def test_a_pool_that_is_too_small_says_what_would_do(
    available: int, blocks: int | None, memory_bytes: int | None, max_model_len: int, block_size: int
) -> None:
    assume(blocks is not None or memory_bytes is None or memory_bytes <= available)
    machine = dataclasses.replace(CPU, available_bytes=available)
    options: dict[str, Any] = {
        "num_kv_blocks": blocks,
        "kv_cache_memory_bytes": memory_bytes,
        "max_model_len": max_model_len,
        "block_size": block_size,
    }
    try:
        config = resolved(machine, **options)
    except ConfigError as caught:
        error = caught
    else:
        assert config.kv_tokens >= max_model_len
        if blocks is None:
            budget = memory_bytes if memory_bytes is not None else available
            assert (config.num_blocks + 1) * config.bytes_per_block <= budget, "the null block is paid for"
        assert resolved(machine, **options) == config, "resolve is pure"
        return
    blamed = "num_kv_blocks" if blocks is not None else "kv_cache_memory_bytes"
    assert error.field == blamed
    advice = {name: int(number) for name, number in re.findall(r"(\w+) to at (?:least|most) (\d+)", str(error))}
    larger = dataclasses.replace(machine, available_bytes=max(available, advice[blamed]))
    assert resolved(larger, **{**options, blamed: advice[blamed]}).max_model_len == max_model_len
    with pytest.raises(ConfigError):
        resolved(larger, **{**options, blamed: advice[blamed] - 1})
    if "max_model_len" in advice:
        shorter = advice["max_model_len"]
        assert resolved(machine, **{**options, "max_model_len": shorter}).max_model_len == shorter
        with pytest.raises(ConfigError):
            resolved(machine, **{**options, "max_model_len": shorter + 1})


def test_the_lines_at_start_show_the_numbers() -> None:
    first, second, third, notice = resolved(num_kv_blocks=2000, max_model_len=1000).lines()
    assert notice.startswith("No native kernels: stock operators compute")
    assert len(resolved(kernels="torch").lines()) == 3
    assert first == "Available KV cache memory: 0.03 GiB (2,000 blocks of 16 tokens in bfloat16, 16,384 bytes each)"
    assert second == "KV cache size: 32,000 tokens, maximum concurrency for 1,000 tokens per request: 31x"
    assert third.startswith("Scheduler: fcfs, at most 256 sequences and 512 tokens a step; prefix caching on;")
    *_, fourth = resolved(swap_space=1 << 29, preemption_mode="swap").lines()
    assert fourth == "Swap space: 0.50 GiB of host memory (32,768 blocks); preemption mode swap"
    assert "prefix caching off" in resolved(enable_prefix_caching=False).lines()[2]


def test_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().block_size = 8  # type: ignore[misc]


def test_a_small_model_runs_on_one_thread_unless_told_otherwise() -> None:
    small = dataclasses.replace(FACTS, num_parameters=3_000_000)
    assert resolve(EngineConfig(), CPU, small).num_threads == 1
    assert resolve(EngineConfig.from_options(num_threads=3), CPU, small).num_threads == 3


# ---- a GPU ----

GPU = Machine(device="cuda", available_bytes=70 << 30, num_threads=4, total_bytes=80 << 30)


def test_a_gpu_is_shared_by_weights_the_worst_step_and_the_pool() -> None:
    facts = dataclasses.replace(FACTS, step=StepCost(fixed_bytes=2 << 30, bytes_per_token=64))
    config = resolve(
        EngineConfig.from_options(max_num_seqs=2048), GPU, dataclasses.replace(facts, max_position=1 << 20)
    )
    # 0.9 x 80 GiB, without the 10 GiB that are taken and the 2 GiB of a step; a block costs what it makes a step take.
    budget = int(0.9 * (80 << 30)) - (12 << 30)
    assert config.num_blocks == budget // (16 * (1024 + 64)) - 1
    assert config.max_num_batched_tokens == 2048
    assert config.num_blocks * config.bytes_per_block + (12 << 30) < 0.9 * (80 << 30)


def test_a_gpu_that_others_have_filled_is_an_error_with_numbers() -> None:
    busy = dataclasses.replace(GPU, available_bytes=1 << 30)
    with pytest.raises(ConfigError, match=r"0\.9 of the GPU's 85,899,345,920 bytes.*gives 0 KV blocks") as caught:
        resolve(EngineConfig(), busy, FACTS)
    assert caught.value.field == "kv_cache_memory_bytes"


def test_a_stated_pool_overrides_the_share_of_a_gpu() -> None:
    assert resolve(EngineConfig.from_options(num_kv_blocks=500), GPU, FACTS).num_blocks == 500
