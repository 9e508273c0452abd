"""Health of dead and stuck engines, which a test cannot bring about in a process, and the counters of `/kv`."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.metrics.stats import Health
from quire.memory.usage import GroupUsage, HostUsage
from quire.server.operations.monitoring import health, host_to_json
from tests.server.process import ServerProcess, running


@pytest.mark.parametrize(
    ("is_alive", "is_stuck", "is_draining", "status", "said"),
    [
        (True, False, False, 200, "ok"),
        (True, True, False, 503, "stuck"),
        (True, True, True, 503, "stuck"),
        (True, False, True, 503, "stopping"),
        (False, False, False, 503, "dead"),
    ],
)
def test_health_is_200_only_while_the_engine_makes_progress(
    is_alive: bool, is_stuck: bool, is_draining: bool, status: int, said: str
) -> None:
    engine = Health(is_alive, is_stuck, 1.25, num_running=1, num_waiting=2, num_steps=3)

    state: Any = SimpleNamespace(llm=SimpleNamespace(health=lambda: engine), is_draining=is_draining)
    response = asyncio.run(health(state, SimpleNamespace()))  # type: ignore[arg-type]
    assert response.status_code == status
    assert json.loads(bytes(response.body)) == {
        "status": said,
        "seconds_since_progress": 1.25,
        "num_running": 1,
        "num_waiting": 2,
        "num_steps": 3,
    }


def test_kv_explains_the_blocks_of_each_group(server: ServerProcess) -> None:
    prompt = list(range(10, 60))
    assert server.http.post("/reset_prefix_cache").json() == {}
    # The engine does it in its turn: before whatever comes later, but not before it is looked at.
    server.wait_until(lambda _: server.http.get("/kv").json()["groups"][0]["idle"] == 0)
    before = server.http.get("/kv").json()
    for _ in range(2):
        assert server.post("/v1/completions", {"prompt": prompt, "max_tokens": 4}).status_code == 200
    server.wait_until_idle()
    after = server.http.get("/kv").json()
    (group,) = after["groups"]
    assert group["used"] == 0
    assert group["idle"] > before["groups"][0]["idle"]
    assert (group["used"] + group["idle"] + group["free"]) * group["bytes_per_block"] == after["num_bytes"]
    first, first_before = after["first_time"], before["first_time"]
    assert first["queried_tokens"] - first_before["queried_tokens"] == 2 * len(prompt)
    assert first["hit_tokens"] - first_before["hit_tokens"] == len(prompt) - 1
    sources = {name: num - first_before["by_source"][name] for name, num in first["by_source"].items()}
    whole = (len(prompt) - 1) // after["block_size"] * after["block_size"]
    copied = len(prompt) - 1 - whole
    assert sources == {"device": whole, "host": 0, "disk": 0, "copied": copied, "computed": len(prompt) + 1}
    reasons = {
        name: num - first_before["computed_by_reason"][name] for name, num in first["computed_by_reason"].items()
    }
    assert {name: num for name, num in reasons.items() if num} == {"not_cached": len(prompt) - 1, "last_token": 2}
    assert after["resumed"] == before["resumed"]
    assert after["host"] is None, "this server has no swap space"
    counters = ("evictions", "copies", "merges", "preemptions", "swaps", "wasted_tokens")
    assert all(type(after[name]) is int for name in counters)
    assert after["merges"] + after["copies"] > before["merges"] + before["copies"], "the last block was continued"


def test_the_host_tier_is_told_with_its_groups() -> None:
    group = GroupUsage(used=3, idle=2, free=1, num_slabs=6, bytes_per_block=64)
    counts = dict.fromkeys(HostUsage._fields, 7) | {"groups": (group,)}
    usage: Any = SimpleNamespace(host=HostUsage(**counts))  # type: ignore[arg-type]
    assert host_to_json(usage) == counts | {"groups": [group._asdict()]}


def test_a_reset_empties_the_prefix_cache_while_others_run(server: ServerProcess) -> None:
    prompt = list(range(70, 120))

    def num_cached() -> int:
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert (num_cached(), num_cached()) == (0, 49)
    long = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=long) as running:
        lines = running.iter_lines()
        next(lines)
        assert server.http.post("/reset_prefix_cache").json() == {}
        assert num_cached() == 0
        assert "[DONE]" in list(lines)[-2]
    assert num_cached() == 49


@pytest.mark.slow
def test_the_status_tells_how_far_an_answer_in_one_piece_is(tmp_path: Path) -> None:
    """It is read at its end, and its tokens are counted now and then."""
    body = {"prompt": "Once", "n": 32, "max_tokens": 1000, "ignore_eos": True}
    with (
        running(Path("bundled"), tmp_path / "log") as server,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(server.post, "/v1/completions", body)
        seen: list[int] = []
        while not answer.done():
            seen += [row["completion_tokens"] for row in server.status()["requests"]]
            time.sleep(0.01)
        assert answer.result().json()["usage"]["completion_tokens"] == 32 * 1000
        metrics = server.http.get("/metrics").text
    assert seen == sorted(seen)
    assert any(0 < num_tokens < 32 * 1000 for num_tokens in seen)
    (gaps,) = [line for line in metrics.splitlines() if line.startswith("vllm:inter_token_latency_seconds_count")]
    assert float(gaps.split()[-1]) == 32 * 999
