"""Records of requests: lines of the log, counters by route, spans, and the queries of the dashboard."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import __version__
from quire.engine.async_llm import AsyncLLM
from quire.errors import ConfigError
from quire.server.app import build_app
from quire.server.log_setup import JsonLines
from quire.server.requests.body import BodyReader
from quire.server.settings import ServerConfig
from quire.server.state.state import ServerState
from quire.server.state.tracing import RequestTracer

SECRET = "a secret\nline of the fox"
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "quire.json"
LOGGER = "quire.server.state.request_log"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_options("bundled", num_kv_blocks=64, num_threads=1, swap_space=1 << 20)
    yield engine
    engine.shutdown()


def requested(
    llm: AsyncLLM,
    *bodies: dict[str, Any] | None,
    path: str = "/v1/chat/completions",
    tracer: Any = None,
    is_draining: bool = False,
    **config: Any,
) -> list[httpx.Response]:
    """Return the answers of an application in this process, to one request after the other; None is a GET."""

    async def scenario() -> list[httpx.Response]:
        settings = ServerConfig(**config)
        bodies_of = BodyReader(settings.body_limit(reads_images=False), llm.resolved.max_model_len)
        state = ServerState(llm, settings, bodies_of, __version__, created=0)
        state.is_draining = is_draining
        transport = httpx.ASGITransport(build_app(state, tracer))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = [
                await client.request("GET" if body is None else "POST", path, json=body, headers=HEADERS)
                for body in bodies
            ]
        bodies_of.close()
        return answers

    return asyncio.run(scenario())


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}


def test_a_line_has_ids_tokens_and_the_end_but_no_text(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    (whole, streamed, bad) = requested(llm, CHAT, CHAT | {"stream": True}, CHAT | {"top_p": 7}, log_requests=True)
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert [answer.status_code for answer in (whole, streamed, bad)] == [200, 200, 400]
    num_prompt = whole.json()["usage"]["prompt_tokens"]
    for line, num_cached in zip(lines[:2], (0, num_prompt - 1), strict=True):
        assert "id=mine-1 method=POST route=/v1/chat/completions status=200 ms=" in line
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        assert (fields["prompt_tokens"], fields["completion_tokens"]) == (str(num_prompt), "4")
        assert fields["finish_reason"] == "length"
        assert int(fields["cached_tokens"]) <= num_cached
    assert whole.json()["id"] in lines[0]
    assert "status=400" in lines[2]
    assert not any("fox" in line for line in lines)


def test_nothing_is_logged_unless_asked(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    requested(llm, CHAT)
    assert not [record for record in caplog.records if record.name == LOGGER]


def test_answered_probes_are_left_out_and_refused_ones_are_not(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    for path, status in (("/health", 200), ("/ping", 200), ("/metrics", 200), ("/version", 200), ("/health", 503)):
        (answer,) = requested(llm, None, path=path, log_requests=True, is_draining=status == 503)
        assert answer.status_code == status
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert [re.findall(r"route=(\S+) status=(\d+)", line) for line in lines] == [
        [("/version", "200")],
        [("/health", "503")],
    ]


def test_prompts_are_cut_and_stay_in_one_line(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    body = {"prompt": [SECRET, "second"], "max_tokens": 1}
    requested(llm, body, path="/v1/completions", log_requests=True, log_prompts=12)
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert "\n" not in record.getMessage()
    line = json.loads(JsonLines().format(record))
    assert line["prompt"] == SECRET[:12]
    assert (line["level"], line["id"], line["status"]) == ("info", "mine-1", 200)


def test_json_lines_hold_errors() -> None:
    try:
        raise ValueError("wrong\nhere")
    except ValueError:
        record = logging.LogRecord("quire", logging.ERROR, "", 0, "it %s", ("failed",), sys.exc_info())
    text = JsonLines().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "it failed"
    assert "ValueError: wrong" in line["error"]


def test_labels_hold_no_text_of_clients(llm: AsyncLLM) -> None:
    requested(llm, CHAT, path="/v1/models/secret-name")
    requested(llm, CHAT, path="/secret-path")
    page = llm.metrics.render().decode()
    assert "secret" not in page
    assert 'http_requests_total{handler="/v1/models/{model_id:path}",method="POST",status="4xx"} 1.0' in page
    assert 'http_requests_total{handler="other",method="POST",status="4xx"} 1.0' in page


@pytest.mark.parametrize(
    ("field", "value"),
    [("log_prompts", -1), ("log_prompts", 5), ("otlp_traces_endpoint", "localhost:4318"), ("otlp_traces_endpoint", "")],
)
def test_options_that_cannot_be_honoured_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        ServerConfig(**{field: value})  # type: ignore[arg-type]


def test_tracing_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"quire\[otel\]"):
        RequestTracer("http://127.0.0.1:4318/v1/traces", __version__)


class Collector(BaseHTTPRequestHandler):
    """A collector of traces on this machine."""

    received: list[bytes]

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_request_is_a_span_of_its_clients_trace(llm: AsyncLLM) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[bytes] = []
    handler = type("Handler", (Collector,), {"received": received})
    with HTTPServer(("127.0.0.1", 0), handler) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        tracer = RequestTracer(f"http://127.0.0.1:{collector.server_port}/v1/traces", __version__)
        began_ns = time.time_ns()
        (answer, _) = requested(llm, CHAT | {"temperature": 0.5, "stream": False}, CHAT | {"top_p": 7}, tracer=tracer)
        tracer.close()
        collector.shutdown()
        thread.join()
    sent = ExportTraceServiceRequest.FromString(b"".join(received))
    (span,) = [span for each in sent.resource_spans for scope in each.scope_spans for span in scope.spans]
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    assert began_ns < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    values = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    usage = answer.json()["usage"]
    assert values["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert values["gen_ai.usage.completion_tokens"] == 4
    assert (values["gen_ai.request.id"], values["gen_ai.response.model"]) == ("mine-1", "bundled")
    assert (values["gen_ai.request.temperature"], values["gen_ai.request.max_tokens"]) == (0.5, 4)
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert sum(values[f"gen_ai.latency.{part}"] for part in parts) <= values["gen_ai.latency.e2e"]
    inference = values["gen_ai.latency.time_in_model_prefill"] + values["gen_ai.latency.time_in_model_decode"]
    assert values["gen_ai.latency.time_in_model_inference"] == pytest.approx(inference)


def test_each_query_of_the_dashboard_names_metrics_that_exist(llm: AsyncLLM) -> None:
    requested(llm, CHAT)
    page = llm.metrics.render().decode()
    shown = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 10
    for query in queries:
        named = set(re.findall(r"(?:vllm:|http_|process_)\w+", query))
        assert named, query
        assert named <= shown, query
