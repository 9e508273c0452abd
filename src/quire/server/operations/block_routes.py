"""`GET /kv/map`, `/kv/tree`, `/kv/block` and `/kv/request`: the KV cache, and details of a block or request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive

from quire.errors import InvalidParameter
from quire.server.generation.generation import json_response
from quire.server.http import sse
from quire.server.kv_views.block_map import Watcher
from quire.server.requests.errors import IS_OPERATOR, ApiError, stopping
from quire.server.state.state import ServerState
from quire.server.state.tenants import read_tenant


async def watch_map(state: ServerState, request: Request) -> ASGIApp:
    """Answer `GET /kv/map`: a stream of events, first a snapshot of all blocks, then changes."""
    tenant = _viewer(state, request)
    if state.is_draining:
        raise stopping()
    events = _events(state, state.views.block_map.watch(tenant), request.receive)
    return sse.EventStream(await anext(events), events)


async def _events(state: ServerState, watcher: Watcher, receive: Receive) -> AsyncGenerator[bytes, None]:
    gone = asyncio.create_task(_close_when_gone(watcher, receive))
    try:
        yield sse.PING.encode()
        async with aclosing(watcher.events(state.config.ping_interval_s)) as events:
            async for event in events:
                yield event
    finally:
        gone.cancel()
        watcher.leave()


async def _close_when_gone(watcher: Watcher, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watcher.close()


async def show_block(state: ServerState, request: Request) -> Response:
    """Answer `GET /kv/block?pool=N&block=N`: state, holders and tokens of a block."""
    tenant = _viewer(state, request)
    pool_idx, block_id = (_number(request, name) for name in ("pool", "block"))
    block = await state.views.describe_block(pool_idx, block_id, tenant)
    token_ids, tokenizer = block["token_ids"], state.llm.tokenizer
    text = None
    if token_ids is not None and tokenizer is not None:
        text = await asyncio.to_thread(tokenizer.decode, token_ids, skip_special_tokens=False)
    return json_response({**block, "text": text})


async def show_request(state: ServerState, request: Request) -> Response:
    """Answer `GET /kv/request?number=N`: the block tables of a request, and where and why its prefix hit ended."""
    tenant = _viewer(state, request)
    number = _number(request, "number")
    description = await state.views.describe_request(number, tenant)
    if description is None:
        raise ApiError(404, f"there is no unfinished request of number {number}", code="not_found", param="number")
    return json_response(description)


async def show_tree(state: ServerState, request: Request) -> Response:
    """Answer `GET /kv/tree`: the prefix tree, the segments with the most holders first."""
    return json_response(await state.views.prefix_tree.read(_viewer(state, request)))


def _viewer(state: ServerState, request: Request) -> str | None:
    """Return the tenant whose requests the client may see; None for all."""
    return None if request.scope[IS_OPERATOR] else read_tenant(state.config, request)


def _number(request: Request, name: str) -> int:
    value = request.query_params.get(name, "")
    if not (value.isascii() and value.isdigit() and len(value) < 16):
        raise InvalidParameter(name, value[:40], "a number, as ?pool=0&block=1 or ?number=1")
    return int(value)
