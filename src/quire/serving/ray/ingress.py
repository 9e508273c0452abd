"""The ingress: it takes HTTP from Ray Serve's proxies and has a replica answer, another one where that fails."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.server.errors import ApiError, unavailable
from quire.serving.proxy.app import HOP_BY_HOP, SESSION_HEADER
from quire.serving.proxy.prompts import PATHS, PromptReader
from quire.serving.proxy.streams import EventCutter, error_event

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
ASK_S = 2.0
LOST = (RayError, RayServeException)


class Ingress:
    """Passes requests on to the engines.

    Args:
        engine: handle of the deployment of `EngineServer`.
        tenant_header: header that names the tenant, None where all clients are one.
    """

    def __init__(self, engine: Any, tenant_header: str | None) -> None:
        self._engine = engine
        self._tenant_header = tenant_header
        self._prompts = PromptReader(self._ask)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        body, path = await request.body(), request.url.path
        headers = [(key, value) for key, value in request.scope["headers"] if key != b"x-request-id"]
        headers.append((b"x-request-id", request.headers.get("x-request-id", uuid.uuid4().hex).encode()))
        scope = {
            "method": request.method,
            "path": path,
            "raw_path": request.scope.get("raw_path") or path.encode(),
            "query_string": request.scope.get("query_string", b""),
            "headers": headers,
        }
        route = await self._route_of(request, path, body)
        for _ in range(MAX_ATTEMPTS):
            items = self._engine.options(stream=True).handle.remote(scope, body, route=route)
            try:
                status, answer = await anext(items)
                first = await anext(items, b"")
            except LOST as error:
                logger.warning("a replica was lost before it answered: %s", error)
                continue
            fields = {key.decode(): value.decode("latin-1") for key, value in answer if key not in HOP_BY_HOP}
            return StreamingResponse(_relay(path, fields, first, items), status, fields)
        return unavailable("every replica that could take this request was lost", "no_replica").response(path)

    async def _route_of(self, request: Request, path: str, body: bytes) -> Mapping[str, Any] | None:
        """Return what the router looks at; None for a request without a prompt."""
        if request.method != "POST" or path not in PATHS:
            return None
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict):
            return None
        tenant = None if self._tenant_header is None else request.headers.get(self._tenant_header)
        prompt = await self._prompts.read(path, body, fields, tenant)
        session = request.headers.get(SESSION_HEADER) or fields.get("prompt_cache_key")
        return {
            "token_ids": prompt.token_ids,
            "scope": tuple(prompt.scope),
            "session": session if isinstance(session, str) else None,
        }

    async def _ask(self, body: bytes) -> bytes | None:
        """Return a replica's answer to `POST /prompt_tokens`, None where there is none in time."""
        try:
            async with asyncio.timeout(ASK_S):
                answer: bytes | None = await self._engine.fetch.remote("/prompt_tokens", body)
                return answer
        except (TimeoutError, *LOST):
            return None


async def _relay(path: str, headers: Mapping[str, str], first: bytes, items: Any) -> AsyncIterator[bytes]:
    """Yield the parts of an answer; a stream that is cut off ends with an error event.

    Raises:
        RayError: an answer that is no stream was cut off.
    """
    cutter = EventCutter(headers.get("content-type", "").encode())
    yield cutter.add(first)
    try:
        async for part in items:
            data = cutter.add(part)
            if data:
                yield data
        yield cutter.finish()
    except LOST as error:
        logger.warning("a replica was lost in the middle of an answer: %s", error)
        if not cutter.is_stream:
            raise
        why = ApiError(503, "the replica of this request was lost", code="replica_lost")
        yield error_event(path, why)
