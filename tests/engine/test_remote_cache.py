"""The remote prefix cache in running engines: one finds what another computed, and a broken store changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.distributed.kvstore.counters import RemoteStats
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import ConfigError
from quire.memory import check
from tests.kvstore.servers import free_port, relay, server

STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "
PROMPTS = [STORY * 3 + "Then", STORY * 3 + "But", STORY * 2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
WAIT_S = 60.0
DEFAULTS: dict[str, Any] = {"num_kv_blocks": 100, "max_model_len": 256, "block_size": 8, "num_threads": 1}


@pytest.fixture(autouse=True, params=[False, True], ids=["step-by-step", "asynchronous"])
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "async_scheduling", request.param)


@pytest.fixture(autouse=True)
def much_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a store that works, however slow this machine is."""
    monkeypatch.setattr("quire.config.cache.STAGING_BYTES", 4 << 20)
    monkeypatch.setattr("quire.engine.kv.source_loads.LEAST_PATIENCE_S", WAIT_S)


def start(url: str, **options: Any) -> LLM:
    return LLM(prefix_cache_url=url, **(DEFAULTS | {"prefix_cache_timeout_s": WAIT_S} | options))


def run(llm: LLM) -> list[RequestOutput]:
    outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    check(llm.engine.scheduler.memory)
    return outputs


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def remote_stats(llm: LLM) -> RemoteStats:
    stats = llm.stats.remote
    assert stats is not None
    return stats


def flush(llm: LLM) -> None:
    stores = llm.engine._disk_prefetch
    assert stores is not None
    remote = stores._disk.remote
    assert remote is not None
    assert remote.flush(WAIT_S)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    llm = LLM(num_kv_blocks=100, max_model_len=256, block_size=8, num_threads=1)
    outputs = run(llm)
    llm.close()
    return texts(outputs)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with server(tmp_path) as running:
        yield running.url


@pytest.mark.slow
def test_an_engine_finds_what_another_computed_while_both_run(url: str, expected: list[str]) -> None:
    one, other = start(url), start(url)
    assert texts(run(one)) == expected
    flush(one)
    outputs = run(other)
    assert texts(outputs) == expected
    first = outputs[0]
    assert first.num_disk_tokens == first.num_cached_tokens == (len(first.prompt_token_ids) - 1) // 8 * 8
    assert remote_stats(other).num_hits * 8 >= first.num_disk_tokens
    assert remote_stats(one).num_saved > 10
    flush(other)
    assert remote_stats(other).num_saved == 0
    # Another salt, another tenant: nothing is found.
    (salted,) = other.generate(PROMPTS[0], GREEDY, use_tqdm=False, cache_salt="mine")
    assert (salted.num_cached_tokens, salted.outputs[0].text) == (0, expected[0])
    one.reset_prefix_cache()
    flush(one)
    third = start(url)
    assert third.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_disk_tokens == 0
    for llm in (one, other, third):
        llm.close()


@pytest.mark.slow
def test_the_disk_comes_first_and_the_store_gives_the_rest(tmp_path: Path, url: str, expected: list[str]) -> None:
    folders = [str(tmp_path / name) for name in ("one", "other")]
    one = start(url, prefix_cache_dir=folders[0])
    assert texts(run(one)) == expected
    one.close()
    again = start(url, prefix_cache_dir=folders[0])
    assert texts(run(again)) == expected
    assert (remote_stats(again).num_hits, again.stats.disk is not None) == (0, True)
    again.close()
    other = start(url, prefix_cache_dir=folders[1])
    assert texts(run(other)) == expected
    assert remote_stats(other).num_hits >= 10
    other.close()
    # What came from afar is on its disk now.
    alone = start(f"redis://127.0.0.1:{free_port()}/0", prefix_cache_dir=folders[1], prefix_cache_timeout_s=0.1)
    outputs = run(alone)
    assert texts(outputs) == expected
    assert outputs[0].num_disk_tokens == outputs[0].num_cached_tokens > 40
    alone.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"block_size": 16}, {"quantization": "int8"}])
def test_another_layout_finds_nothing(url: str, options: dict[str, Any]) -> None:
    one = start(url)
    run(one)
    one.close()
    other = start(url, **options)
    assert sum(output.num_disk_tokens for output in run(other)) == 0
    other.close()


def test_a_dead_store_changes_no_token(expected: list[str]) -> None:
    llm = start(f"redis://127.0.0.1:{free_port()}/0", prefix_cache_timeout_s=0.2)
    assert texts(run(llm)) == expected
    stats = remote_stats(llm)
    assert (stats.num_hits, stats.num_saved) == (0, 0)
    assert stats.num_failures + stats.num_refused > 0
    llm.close()


def test_a_store_that_hangs_changes_no_token(expected: list[str]) -> None:
    with relay(0, lambda _: lambda _: b"") as port:
        llm = start(f"redis://127.0.0.1:{port}/0", prefix_cache_timeout_s=0.05)
        assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        assert remote_stats(llm).num_hits == 0
        llm.close()


def test_options_that_cannot_be_honoured() -> None:
    with pytest.raises(ConfigError, match="prefix_cache_url must be redis://"):
        start("http://127.0.0.1")
    with pytest.raises(ConfigError, match="prefix_cache_url needs enable_prefix_caching"):
        start("redis://127.0.0.1", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="prefix_cache_write_policy needs prefix_cache_dir or prefix_cache_url"):
        LLM(prefix_cache_write_policy="write_through")
    with pytest.raises(ConfigError, match="prefix_cache_timeout_s must be a number above 0"):
        start("redis://127.0.0.1", prefix_cache_timeout_s=0)
