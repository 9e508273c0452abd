"""OpenTelemetry traces: a span for each generating request, with the GenAI attributes that vLLM sets."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from quire.config.extras import importing_extra
from quire.server.admission.in_flight import InFlightRequest

if TYPE_CHECKING:  # an extra, imported only if traces are enabled
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
SERVICE = "quire"


class RequestTracer:
    """Makes the spans of requests, and sends them from a thread of its own.

    Args:
        endpoint: address of an OTLP collector over HTTP, with its path, such as `http://127.0.0.1:4318/v1/traces`.
        version: version of Quire.
        exporter: exporter of spans, instead of one to `endpoint`.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, version: str, exporter: SpanExporter | None = None) -> None:
        with importing_extra("otlp_traces_endpoint"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": SERVICE, "service.version": version}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer(SERVICE, version)

    def record(
        self,
        tracked: InFlightRequest,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        model_name: str,
        request_id: str,
        status: int,
    ) -> None:
        """Make the span of a request that has ended.

        Args:
            tracked: the request.
            headers: its HTTP headers; `traceparent` and `tracestate` name the span's parent.
            model_name: name of the model.
            request_id: id of the request in logs.
            status: HTTP status of its answer; 500 and above is an error.
        """
        now_s, now_ns = time.monotonic(), time.time_ns()
        attributes = {
            "gen_ai.response.model": model_name,
            "gen_ai.request.id": request_id,
            "http.response.status_code": status,
            **_request_attributes(tracked, now_s),
        }
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(carrier),
            kind=self._kind,
            start_time=now_ns - int(1e9 * (now_s - tracked.started_s)),
            attributes=attributes,
        )
        if status >= 500:
            span.set_status(self._failed)
        span.end(now_ns)

    def close(self) -> None:
        """Send the spans that are left, and end the thread."""
        self._provider.shutdown()


def _request_attributes(tracked: InFlightRequest, now_s: float) -> dict[str, Any]:
    count, params, times = tracked.count, tracked.params, tracked.times
    named: dict[str, Any] = {
        "gen_ai.response.id": tracked.answer_id,
        "gen_ai.usage.prompt_tokens": count.num_prompt,
        "gen_ai.usage.cached_tokens": count.num_cached,
        "gen_ai.usage.completion_tokens": count.num_output,
        "gen_ai.response.finish_reasons": list(count.finish_reasons),
        "gen_ai.latency.e2e": now_s - tracked.started_s,
    }
    if params is not None:
        named |= {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": params.n,
        }
    if times is not None:
        scheduled_s, first_s, finished_s = times.first_scheduled_s, times.first_token_s, times.finished_s
        named |= {
            "gen_ai.latency.time_in_queue": _between(times.arrival_s, scheduled_s),
            "gen_ai.latency.time_to_first_token": _between(times.arrival_s, first_s),
            "gen_ai.latency.time_in_model_prefill": _between(scheduled_s, first_s),
            "gen_ai.latency.time_in_model_decode": _between(first_s, finished_s),
            "gen_ai.latency.time_in_model_inference": _between(scheduled_s, finished_s),
        }
    return {name: value for name, value in named.items() if value is not None}


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else max(0.0, end_s - begin_s)
