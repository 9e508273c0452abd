"""The parts of the Ray Serve application that need no Ray: options, answers over a handle, metrics, scaling."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from quire.errors import ConfigError, WorkerError
from quire.fleet.ray import app
from quire.fleet.ray.app_call import run_app
from quire.fleet.ray.autoscaling import QUEUED_TOKENS, RUNNING, QueuedTokensPolicy
from quire.fleet.ray.call import AnswerHead, RoutedCall
from quire.fleet.ray.config import AppConfig
from quire.fleet.ray.device import device_of
from quire.fleet.ray.metrics import INGRESS, merge_metrics

CALL = RoutedCall("POST", b"/a%20b?c=d", ((b"x-name", b"value"),), b"body")


# ---- options ----


def test_texts_of_a_command_line_are_read_by_the_types_of_the_options() -> None:
    config = AppConfig.read(
        {
            "model": "bundled",
            "max-model-len": "512",
            "kv_cache_memory_bytes": "1GiB",
            "tenant_header": "x-team",
            "log_requests": "true",
            "num_replicas": "3",
            "num_cpus": "2",
        }
    )
    assert (config.engine.model.max_model_len, config.engine.model.num_threads) == (512, 2)
    assert config.engine.cache.kv_cache_memory_bytes == 1 << 30
    assert (config.server.tenant_header, config.server.log_requests) == ("x-team", True)
    assert (config.replicas.num_replicas, config.replicas.num_cpus) == (3, 2)
    assert config.engine.scheduler.max_queue_len == 1024


def test_values_of_a_file_are_taken_as_they_are() -> None:
    config = AppConfig.read({"num_threads": 1, "allow_origins": ["https://a.example"], "max_replicas": None})
    assert (config.engine.model.num_threads, config.server.allow_origins) == (1, ("https://a.example",))


@pytest.mark.parametrize(
    ("arguments", "field", "said"),
    [
        ({"modle": "x"}, "modle", "unknown option"),
        ({"port": 80}, "port", "Serve's own proxies"),
        ({"num_replicas": 0}, "num_replicas", "at least 1"),
        ({"num_replicas": "many"}, "num_replicas", "'many'"),
        ({"num_replicas": 3, "max_replicas": 2}, "max_replicas", "at least 3"),
        ({"num_gpus": -1}, "num_gpus", "of at least 0"),
        ({"num_gpus": 1.5}, "num_gpus", "whole above 1"),
        ({"num_cpus": 0.00001}, "num_cpus", "four decimals"),
        ({"downscale_delay_s": -1}, "downscale_delay_s", "of at least 0"),
        ({"max_model_len": "none"}, "max_model_len", "'none'"),
        ({"drain_timeout_s": -1}, "drain_timeout_s", "-1"),
        ({"kv_events_host": ""}, "kv_events_host", "non-empty"),
    ],
)
def test_an_option_that_is_not_allowed_is_named(arguments: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        AppConfig.read(arguments)
    assert caught.value.field == field


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert AppConfig.read({}).server.api_key == "secret"
    assert AppConfig.read({"api_key": "other"}).server.api_key == "other"


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_the_application_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'quire\[ray\]'"):
        app({})


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'quire[ray]'")
# Of Ray's own modules, while they are imported.
rays_warnings = pytest.mark.filterwarnings("ignore")


@needs_ray
@rays_warnings
def test_a_router_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.Router") as caught:
        app({"request_router": "no.such.Router"})
    assert caught.value.field == "request_router"


@needs_ray
@rays_warnings
def test_ranks_reserve_the_gpus_of_their_replica_on_its_node() -> None:
    from quire.fleet.ray.application import engine_deployment

    app({"num_gpus": 2, "num_cpus": 4, "tensor_parallel_size": 2})  # Serve refuses an actor beyond its bundle
    options = engine_deployment(AppConfig.read({"num_gpus": 2, "num_cpus": 4, "tensor_parallel_size": 2}))
    assert options["placement_group_bundles"] == [{"CPU": 4, "GPU": 2}, {"CPU": 4}]
    assert options["placement_group_strategy"] == "STRICT_PACK"


# ---- devices ----


def test_a_replica_without_a_gpu_of_its_own_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [device_of(option, []) for option in ("auto", "cpu")] == ["cpu", "cpu"]
    assert [device_of(option, ["0"]) for option in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    with pytest.raises(ConfigError, match="set num_gpus") as caught:
        device_of("cuda", [])
    assert caught.value.field == "num_gpus"


def test_a_gpu_that_a_node_only_claims_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_of("auto", ["0"]) == "cpu"
    assert "GPU 0" in caplog.text
    with pytest.raises(ConfigError, match="finds no CUDA GPU"):
        device_of("cuda", ["0"])


# ---- answers over a handle ----


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what arrived."""
    message = await receive()
    headers = dict(scope["headers"])
    await send({"type": "http.response.start", "status": 201, "headers": [(b"x-answer", headers[b"x-name"])]})
    said = f"{scope['method']} {scope['path']} {scope['query_string'].decode()} ".encode()
    await send({"type": "http.response.body", "body": said, "more_body": True})
    for _ in range(200):  # more than what may wait
        await send({"type": "http.response.body", "body": message["body"], "more_body": True})
    await send({"type": "http.response.body", "body": b"."})


def test_an_answer_comes_whole_with_its_head_first() -> None:
    async def run() -> None:
        head, *parts = [item async for item in run_app(echo, CALL, "r")]
        assert head == AnswerHead(201, ((b"x-answer", b"value"),), "r")
        assert b"".join(part for part in parts if isinstance(part, bytes)) == b"POST /a b c=d " + b"body" * 200 + b"."

    asyncio.run(run())


def test_an_answer_that_is_left_ends_the_request() -> None:
    ended = []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's signature
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"a", "more_body": True})
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    async def run() -> None:
        async with aclosing(run_app(endless, CALL, "r")) as items:
            assert isinstance(await anext(items), AnswerHead)
            assert set(await anext(items)) == {ord("a")}
        assert ended == [True]

    asyncio.run(run())


@pytest.mark.parametrize("raises", [False, True])
def test_an_answer_that_is_cut_off_is_an_error(raises: bool) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's signature
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if raises:
            raise RuntimeError("it breaks")

    async def read() -> list[AnswerHead | bytes]:
        return [item async for item in run_app(broken, CALL, "r")]

    with pytest.raises(WorkerError, match="cut off"):
        asyncio.run(read())


# ---- metrics and scaling ----


def test_metrics_of_all_replicas_have_their_names() -> None:
    text = b'# HELP q_requests_total Requests.\n# TYPE q_requests_total counter\nq_requests_total{end="a"} %d.0\n'
    merged = merge_metrics([("one", text % 1), RuntimeError("lost"), ("two", text % 2)]).decode().splitlines()
    assert merged == [
        "# HELP q_requests_total Requests.",
        "# TYPE q_requests_total counter",
        'q_requests_total{end="a",replica="one"} 1.0',
        'q_requests_total{end="a",replica="two"} 2.0',
    ]


def test_metrics_of_all_ingresses_keep_the_labels_of_their_replicas() -> None:
    text = b'# TYPE q gauge\nq{replica="one"} 1.0\n'
    lines = merge_metrics([("first", text), ("second", text)], INGRESS).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'q{ingress="first",replica="one"} 1.0',
        'q{ingress="second",replica="one"} 1.0',
    ]


@pytest.mark.parametrize(
    ("queued", "running", "wanted"),
    [([0, 0], [0, 0], 0), ([1000, 0], [1, 1], 1), ([2500, 100], [1, 1], 2.6), ([0, 0], [40, 40], 8)],
)
def test_replicas_follow_the_tokens_that_wait_and_the_sequences_that_run(
    queued: list[float], running: list[float], wanted: float
) -> None:
    metrics = {QUEUED_TOKENS: dict(enumerate(queued)), RUNNING: dict(enumerate(running))}
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=5)
    assert QueuedTokensPolicy(1000, 10)(context) == (pytest.approx(wanted), {})


def test_without_reports_the_number_stays() -> None:
    context = SimpleNamespace(aggregated_metrics={}, target_num_replicas=5)
    assert QueuedTokensPolicy(1000, 10)(context) == (5.0, {})
