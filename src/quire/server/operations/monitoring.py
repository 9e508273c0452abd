"""The monitoring routes: health, metrics, version, status and the KV cache."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.metrics.stats import EngineStats
from quire.memory.results import TokenAccount
from quire.memory.usage import HostUsage, Usage
from quire.scheduling.stats import metrics_of
from quire.server.generation.generation import json_response
from quire.server.requests.body import check_json, is_from_page
from quire.server.requests.errors import IS_OPERATOR, ApiError
from quire.server.state.state import ServerState
from quire.server.state.tenants import read_tenant

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /health`: 200 while the engine makes progress or has nothing to do, else 503."""
    engine = state.llm.health()
    if not engine.is_alive:
        status = "dead"
    elif engine.is_stuck:
        status = "stuck"
    else:
        status = "stopping" if state.is_draining else "ok"
    response = json_response(
        {
            "status": status,
            "seconds_since_progress": round(engine.seconds_since_progress, 3),
            "num_running": engine.num_running,
            "num_waiting": engine.num_waiting,
            "num_steps": engine.num_steps,
        }
    )
    response.status_code = 200 if status == "ok" else 503
    return response


async def metrics(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /metrics` in Prometheus' text format."""
    return Response(state.llm.metrics.render(), headers={"content-type": METRICS_TYPE})


async def load(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /load`: the number of requests in progress."""
    return json_response({"server_load": len(state.in_flight)})


async def version(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /version`."""
    return json_response({"version": state.version})


async def status(state: ServerState, request: Request) -> Response:
    """Answer `GET /status`: the values that the page shows; a tenant's client sees the tenant's requests only."""
    now = time.monotonic()
    tenant = None if request.scope[IS_OPERATOR] else read_tenant(state.config, request)
    usage, resolved = state.llm.usage(), state.llm.resolved
    swapped = {request_id.rpartition("-")[0] for request_id in state.llm.swapped_requests()}
    return json_response(
        {
            "model": state.llm.model_name,
            "version": state.version,
            "device": resolved.device,
            "max_model_len": resolved.max_model_len,
            "block_size": resolved.block_size,
            "bytes_per_block": resolved.bytes_per_block,
            "has_chat": state.llm.tokenizer is not None and state.llm.tokenizer.chat_template is not None,
            "engine": state.llm.health()._asdict(),
            "memory": usage._asdict() | {"groups": _groups(usage), "host": host_to_json(usage)},
            "requests": [
                {
                    "id": tracked.answer_id,
                    "age_s": round(now - tracked.started_s, 3),
                    "prompt_tokens": tracked.count.num_prompt,
                    "completion_tokens": tracked.count.num_output,
                    "swapped": tracked.answer_id in swapped,
                }
                for tracked in state.in_flight
                if tenant is None or tracked.tenant == tenant
            ],
        }
    )


async def kv(state: ServerState, request: Request) -> Response:
    """Answer `GET /kv`: the blocks of each cache group by state, and their counters since the start.

    A client sees the pins of its tenant only.
    """
    usage, stats, report = state.llm.usage(), state.llm.stats(), state.llm.kv_report()
    pins = report.pins
    if not request.scope[IS_OPERATOR]:
        tenant = read_tenant(state.config, request)
        pins = pins if tenant is None else pins.of_tenant(tenant)
    return json_response(
        {
            "block_size": state.llm.resolved.block_size,
            "num_bytes": usage.num_bytes,
            "used_bytes": usage.used_bytes,
            "lost_bytes": usage.lost_bytes,
            "saved_bytes": usage.saved_bytes,
            "groups": _groups(usage),
            "num_sequences": usage.num_sequences,
            "num_tokens": usage.num_tokens,
            "first_time": {
                "queried_tokens": stats.prefix_queries,
                "hit_tokens": stats.prefix_hits,
                **_account(stats.first_time),
            },
            "resumed": {
                "queried_tokens": stats.resumed_queries,
                "hit_tokens": stats.resumed_hits,
                **_account(stats.resumed),
            },
            **{
                metric.kv_key: getattr(stats, name)
                for name, metric in metrics_of(EngineStats).items()
                if metric.kv_key is not None
            },
            "pins": pins._asdict(),
            "retained_bytes": report.retained_bytes,
            "retention_limit_bytes": report.retention_limit_bytes,
            "residency": report.residency and {name: times._asdict() for name, times in report.residency.items()},
            "host": host_to_json(usage),
            "disk": None if stats.disk is None else stats.disk._asdict(),
            "transfer": None if stats.transfer is None else stats.transfer._asdict(),
            "remote": None if stats.remote is None else stats.remote._asdict(),
            "images": None if stats.images is None else stats.images._asdict(),
        }
    )


async def kv_event_sources(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /kv_event_sources`: the publishers of KV events, by data-parallel rank; empty without any."""
    source = state.llm.kv_event_source()
    return json_response({} if source is None else {"0": source})


def _account(account: TokenAccount) -> dict[str, Any]:
    return {"by_source": account.sources._asdict(), "computed_by_reason": account.by_reason()}


def _groups(usage: Usage | HostUsage) -> list[dict[str, int]]:
    return [group._asdict() for group in usage.groups]


def host_to_json(usage: Usage) -> dict[str, Any] | None:
    """Return the counts of the host tier, None without one."""
    return None if usage.host is None else usage.host._asdict() | {"groups": _groups(usage.host)}


async def reset_prefix_cache(state: ServerState, request: Request) -> Response:
    """Answer `POST /reset_prefix_cache`: later requests find no block that was computed before."""
    if state.config.tenant_header is not None and not request.scope[IS_OPERATOR]:
        raise ApiError(403, "it empties the cache of all tenants, which needs the operator's key", code="operator_only")
    # A browser sends this content type to another site only after a preflight request.
    if is_from_page(request):
        check_json(request)
    await state.llm.reset_prefix_cache()
    return json_response({})
