"""Options: taken where they belong, or refused by name and number; what completes them is in `test_resolve.py`."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from quire import config as config_module
from quire.config import (
    KV_CACHE_DTYPES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    MultimodalConfig,
    SchedulerConfig,
    option_sections,
)
from quire.errors import ConfigError
from quire.memory.pool import eviction as memory_eviction
from quire.scheduling import policies


def refused(**options: Any) -> ConfigError:
    """Return the refusal of options, which names one of them."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**options)
    assert caught.value.field in options
    return caught.value


def test_the_eviction_policies_are_those_of_memory() -> None:
    """The configuration lies below memory, and so cannot ask it."""
    assert tuple(memory_eviction.EVICTION_POLICIES) == config_module.EVICTION_POLICIES


def test_the_preemption_policies_are_those_of_the_scheduler() -> None:
    assert tuple(policies.PREEMPTION_POLICIES) == config_module.PREEMPTION_POLICIES


# ---- options one by one ----

# What must be asked for beside an option, so that it means something.
NEEDED: dict[str, dict[str, Any]] = {
    "enable_expert_parallel": {"tensor_parallel_size": 2},
    "cpu_bind": {"tensor_parallel_size": 2},
    "cudagraph_mode": {"kernels": "triton"},
    "cudagraph_capture_sizes": {"kernels": "triton"},
    "piecewise_cudagraph_capture_sizes": {"kernels": "triton", "cudagraph_mode": "full_and_piecewise"},
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
        ("sanitize_control_tokens", ["always", "by-default", "on-request"], ["", "never", True]),
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
        ("tokenizer_pre", [None, "llama-bpe"], ["", 3]),
        ("mmproj", [None, "mmproj-F16.gguf"], ["", 3]),
        ("skip_tokenizer_init", [True, False], [None, 0, "false"]),
        ("deterministic", [True, False], [None, 1, "yes"]),
        ("enable_prefix_caching", [True, False], [None, 1, "no"]),
        ("dtype", ["auto", "bfloat16", "float16", "float32"], ["fp8", "", None, 32]),
        ("kv_cache_dtype", [*KV_CACHE_DTYPES], ["int4", "fp16", "", None, 8]),
        ("device", ["auto", "cpu", "cuda"], ["tpu", "CPU", None]),
        ("kernels", ["auto", "native", "torch", "triton"], ["fast", "", None, 1]),
        ("model_impl", ["auto", "native", "transformers"], ["vllm", "", None, 1]),
        ("quantization", [None, "int8", "int4"], ["int2", "", "none", 8]),
        ("stored_quantization", [None, "awq", "gguf"], ["int8", "", "marlin", 8]),
        ("weight_packing", ["auto", "plain", "lossless"], ["tight", "", None, 1]),
        ("classifier_from_token", [None, "no,yes"], ["yes", "", "a,b,c", 3]),
        ("eviction_policy", ["lru", "fifo", "lfu", "slru"], ["mru", "", None]),
        ("scheduling_policy", ["fcfs", "priority"], ["lifo", None]),
        ("priority_aging", [1, 100_000], [0, -1, 2.5, None, True]),
        ("preemption_policy", ["last", "least_waste"], ["first", "", None]),
        ("preemption_mode", ["auto", "recompute"], ["swap", "copy", None]),
        ("swap_space", [0, 4096, 1 << 40], [-1, None, 0.5, "4X", 4, 1023, True]),
        ("seed", [0, 2**63 - 1], [-1, None, 1.0, True]),
        ("max_model_len", [None, 1, 10**6], [0, -2, 1.5, "8", True]),
        ("num_threads", [None, 1], [0, "4", False]),
        ("block_size", [1, 16, 1024], [0, 1025, None, 16.0, True]),
        ("num_kv_blocks", [None, 1], [0, 1.0]),
        ("kv_cache_memory_bytes", [None, 1024, 1 << 60], [0, 1, 1023, "1Gi", 1e9]),
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
        ("async_scheduling", [None, True, False], [1, "yes", 0]),
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
        ("pipeline_parallel_size", [1, 2, 64], [0, 65, None, "2", True]),
        ("pipeline_microbatches", [None, 1, 64], [0, 65, 2.0, "2", True]),
        ("all_reduce_backend", ["auto", "shared_memory", "gloo", "nccl"], ["mpi", "", None]),
        ("enable_expert_parallel", [True, False], [1, None, "yes"]),
        ("cpu_bind", ["auto", "none", "0-3|4-7", "1,3|0"], ["cores", "0-3|3", "0|1|2", "5-4|1", "0|", 3, None]),
        ("enforce_eager", [True, False], [1, None, "no"]),
        ("cudagraph_mode", ["full_decode_only", "full_and_piecewise"], ["full", "", None, 1]),
        ("cudagraph_capture_sizes", [None, (1, 4)], [(), "8", 8]),
        ("piecewise_cudagraph_capture_sizes", [None, (16, 64)], [(), "8", 8]),
        ("distributed_timeout_s", [60, 0.5], [0, -1.0, math.inf, "60", None, True]),
        ("kv_events_config", [None], ["{", 3, "[]"]),
        ("kv_events_format", ["map", "array"], ["maps", "", None]),
        ("max_lora_rank", [1, 512], [0, 513, None, "8", True]),
        ("max_cpu_loras", [None, 1], [0, 1.5, "8", True]),
        ("limit_mm_per_prompt", [None, {}, {"image": 0}, {"image": 4, "video": 0}], [4, {"image": -1}, {"video": 1}]),
        ("language_model_only", [True, False], [None, 1, "yes"]),
        (
            "mm_processor_kwargs",
            [None, {}, {"max_pixels": 5}, {"size": {"shortest_edge": 1}}],
            [5, {"a": 1}, {"size": 5}, {"size": {"a": 1}}],
        ),
        ("allowed_local_media_path", [None, "folder"], [3, True]),
        ("allowed_media_domains", [(), ("a.example", "b")], [5, ("https://a",), ("a:80",), ("",)]),
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


def test_images_of_a_prompt_are_limited_in_number_and_size() -> None:
    def images(**options: Any) -> MultimodalConfig:
        return EngineConfig.from_options(**options).multimodal

    assert [images().max_images, images(limit_mm_per_prompt={"video": 0}).max_images] == [16, 16]
    assert images(limit_mm_per_prompt={"image": 3}).max_images == 3
    assert images(limit_mm_per_prompt={"image": 3}, language_model_only=True).max_images == 0
    size = {"size": {"shortest_edge": 2048, "longest_edge": 4096}}
    for given in (size, {"min_pixels": 2048, "max_pixels": 4096}):
        assert images(mm_processor_kwargs=given).processor_changes == {"min_pixels": 2048, "max_pixels": 4096}
    with pytest.raises(ConfigError, match="either size or min_pixels and max_pixels"):
        images(mm_processor_kwargs={**size, "max_pixels": 4096})
    assert images(allowed_local_media_path="").allowed_local_media_path is None  # vLLM's default
    assert images(allowed_media_domains="a.example").allowed_media_domains == ("a.example",)


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


def test_swapping_needs_somewhere_to_swap_to() -> None:
    error = refused(preemption_mode="swap")
    assert "swap_space, which is 0" in str(error)
    assert EngineConfig.from_options(preemption_mode="swap", swap_space=4096).cache.swap_space == 4096


def test_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().block_size = 8  # type: ignore[misc]
