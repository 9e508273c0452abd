"""Where asynchronous scheduling is used, and which options are refused beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.config import EngineConfig, Machine, ModelFacts, resolve
from quire.errors import ConfigError

CPU = Machine(device="cpu", available_bytes=1 << 30, num_threads=4)
GPU = Machine(device="cuda", available_bytes=70 << 30, num_threads=4, total_bytes=80 << 30)
FACTS = ModelFacts(max_position=256, bytes_per_token=64, vocab_size=32, num_parameters=1)
# Options that are not served, one at a time.
OTHERS: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 2},
]
STORES: list[dict[str, Any]] = [
    {"prefix_cache_dir": "cache"},
    {"prefix_cache_dir": "cache", "tensor_parallel_size": 2},
    {"prefix_cache_url": "redis://host:1/0"},
    {"kv_transfer_config": '{"kv_role": "kv_both"}'},
]


@pytest.mark.parametrize(("machine", "is_used"), [(CPU, False), (GPU, True)])
def test_it_is_the_default_on_a_gpu(machine: Machine, is_used: bool) -> None:
    config = resolve(EngineConfig.from_options(), machine, FACTS)
    assert config.async_scheduling is is_used
    assert any("Asynchronous scheduling" in line for line in config.lines()) is is_used
    for wanted in (True, False):
        assert resolve(EngineConfig.from_options(async_scheduling=wanted), machine, FACTS).async_scheduling is wanted


def test_tensor_parallel_ranks_run_ahead_too() -> None:
    config = EngineConfig.from_options(tensor_parallel_size=2)
    assert resolve(config, GPU, FACTS).async_scheduling
    assert not resolve(config, CPU, FACTS).async_scheduling


@pytest.mark.parametrize("options", OTHERS, ids=lambda options: next(iter(options)))
def test_what_it_does_not_serve_is_refused_where_it_is_asked_for_and_turns_the_default_off(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="with async_scheduling, got") as caught:
        EngineConfig.from_options(async_scheduling=True, **options)
    assert caught.value.field in options
    assert not EngineConfig.from_options(async_scheduling=False, **options).scheduler.async_scheduling
    assert not resolve(EngineConfig.from_options(**options), GPU, FACTS).async_scheduling


def test_drafts_are_served() -> None:
    methods: tuple[tuple[dict[str, Any], str], ...] = (
        ({"speculative_method": "ngram"}, "launched while the one before it runs, or before outputs are made of that"),
        ({"speculative_method": "draft", "draft_model": "bundled"}, "launched before outputs are made of the last one"),
    )
    for method, behind in methods:
        config = resolve(EngineConfig.from_options(**method), GPU, FACTS)
        assert config.async_scheduling
        assert behind in config.lines()[-1]
        assert EngineConfig.from_options(async_scheduling=True, **method).scheduler.async_scheduling


@pytest.mark.parametrize("options", STORES, ids=" ".join)
def test_stores_of_blocks_are_served(options: dict[str, Any]) -> None:
    assert resolve(EngineConfig.from_options(**options), GPU, FACTS).async_scheduling
    assert EngineConfig.from_options(async_scheduling=True, **options).scheduler.async_scheduling


def test_an_encoder_has_no_tokens_to_wait_for() -> None:
    facts = replace(FACTS, is_encoder=True)
    assert not resolve(EngineConfig.from_options(), GPU, facts).async_scheduling
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig.from_options(async_scheduling=True), GPU, facts)
    assert caught.value.field == "async_scheduling"
