"""`resolve` completes options by what a machine and a model have, or refuses them with the numbers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.config import (
    EngineConfig,
    Machine,
    ModelFacts,
    ResolvedConfig,
    StepCost,
    resolve,
)
from quire.config.cache import MIN_BYTES
from quire.errors import ConfigError

CPU = Machine(device="cpu", available_bytes=1 << 30, num_threads=4)
FACTS = ModelFacts(max_position=2048, bytes_per_token=1024, vocab_size=500, num_parameters=10**9)


def resolved(machine: Machine = CPU, facts: ModelFacts = FACTS, **options: Any) -> ResolvedConfig:
    return resolve(EngineConfig.from_options(**options), machine, facts)


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
        sanitize_control_tokens="by-default",
    )
    assert dataclasses.astuple(config) == (
        *("cpu", 2, 100, 32, 40, 32768, 4, 6, False, "slru", 0.1, 1 << 20, 6, 7),
        *("priority", 99, "least_waste", "swap", 9, 500, 11, "torch", 0.2, 0.3, 0.4, 64, 1 << 20, 32, None, 30.5),
        *("int8", "int8", "suffix", 5, True, None, False, (), None, (), (), False, "by-default"),
    )
    assert config.max_concurrency == 6, "no more than max_num_seqs"


@pytest.mark.parametrize(
    ("device", "max_num_seqs", "budget"),
    [("cpu", 256, 512), ("cpu", 600, 600), ("cuda", 256, 8192), ("cuda", 9000, 9000)],
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
    memory_bytes=st.none() | st.integers(MIN_BYTES, 1 << 22),
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
    facts = dataclasses.replace(FACTS, host_blocks=lambda num_bytes: num_bytes // 16384 - 1)
    options = EngineConfig.from_options(swap_space=1 << 29, preemption_mode="swap")
    *_, fourth = resolve(options, CPU, facts).lines()
    assert fourth == "Swap space: 0.50 GiB of host memory (32,767 blocks); preemption mode swap"
    assert "prefix caching off" in resolved(enable_prefix_caching=False).lines()[2]


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
    assert config.max_num_batched_tokens == 8192
    assert config.num_blocks * config.bytes_per_block + (12 << 30) < 0.9 * (80 << 30)


def test_what_a_gpu_has_left_is_for_adapters() -> None:
    facts = dataclasses.replace(FACTS, step=StepCost(fixed_bytes=2 << 30, bytes_per_token=64))
    options = {"enable_lora": True, "num_kv_blocks": 999}
    config = resolve(EngineConfig.from_options(**options), GPU, facts)
    # Without the pool and its null block, the largest step, and a fiftieth of the GPU.
    left = (70 << 30) - 1000 * 16 * (1024 + 64) - (2 << 30) - int(0.02 * (80 << 30))
    assert config.adapter_bytes == left
    assert f"Memory for more adapters: {left / (1 << 30):.2f} GiB" in config.lines()
    full = dataclasses.replace(GPU, available_bytes=3 << 30)
    assert resolve(EngineConfig.from_options(**options), full, facts).adapter_bytes == 0
    assert resolve(EngineConfig.from_options(**options), CPU, FACTS).adapter_bytes is None
    assert resolve(EngineConfig.from_options(num_kv_blocks=999), GPU, facts).adapter_bytes is None


def test_a_gpu_that_others_have_filled_is_an_error_with_numbers() -> None:
    busy = dataclasses.replace(GPU, available_bytes=1 << 30)
    with pytest.raises(ConfigError, match=r"0\.9 of the GPU's 85,899,345,920 bytes.*gives 0 KV blocks") as caught:
        resolve(EngineConfig(), busy, FACTS)
    assert caught.value.field == "kv_cache_memory_bytes"


def test_a_stated_pool_overrides_the_share_of_a_gpu() -> None:
    assert resolve(EngineConfig.from_options(num_kv_blocks=500), GPU, FACTS).num_blocks == 500
