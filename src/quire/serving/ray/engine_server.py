"""One replica: an engine and the server's application, in an actor of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from quire import __version__
from quire.config import EngineConfig
from quire.errors import WorkerError

logger = logging.getLogger(__name__)


class EngineServer:
    """Answers the whole HTTP surface of a server, without a socket.

    Args:
        engine_options: options of the engine, as flat as those of `LLM(...)`.
        server_options: options of `ServerConfig`.
        host: address of this machine for the other replicas' routers; a loopback address keeps events on it.
    """

    def __init__(self, engine_options: Mapping[str, Any], server_options: Mapping[str, Any], host: str) -> None:
        from quire.engine.async_llm import AsyncLLM
        from quire.server.app import build_app
        from quire.server.body import BodyReader
        from quire.server.lifecycle import read_reasoning, read_tool_format
        from quire.server.settings import ServerConfig
        from quire.server.state import ServerState

        self._host = host
        where = "127.0.0.1" if host.startswith("127.") else "*"
        events = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://{where}:*",
            "replay_endpoint": f"tcp://{where}:*",
        }
        config = EngineConfig.from_options(**{"kv_events_config": events, **engine_options})
        self._llm = AsyncLLM.from_config(config)
        resolved = self._llm.resolved
        server_config = ServerConfig(**server_options)
        bodies = BodyReader(server_config.max_body_bytes, max(resolved.max_model_len, resolved.vocab_size))
        form = read_tool_format(self._llm.tokenizer, server_config.tool_call_parser)
        self._state = ServerState.local(
            self._llm, server_config, bodies, __version__, created=int(time.time()), tool_format=form
        )
        self._state.aliases = config.model.served_names[1:]
        ends = self._llm.texts.end_token_ids
        self._state.reasoning = read_reasoning(self._llm.tokenizer, server_config.reasoning_parser, ends)
        self._app = build_app(self._state)

    async def handle(self, scope: Mapping[str, Any], body: bytes, route: Any = None) -> AsyncIterator[Any]:  # noqa: ARG002 - for the router
        """Answer a request: yield status and headers, then the parts of the body.

        Args:
            scope: method, path, raw_path, query_string and headers, as in ASGI.
            body: body of the request.
            route: what the router looks at.
        """
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(16)
        has_body = False

        async def receive() -> dict[str, Any]:
            nonlocal has_body
            if not has_body:
                has_body = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # until the request ends, or its task is cancelled
            raise AssertionError

        async def run() -> None:
            asgi = {"type": "http", "http_version": "1.1", "scheme": "http", "client": None, **scope}
            try:
                await self._app(asgi, receive, messages.put)  # type: ignore[arg-type]
            finally:
                await messages.put(None)

        task = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [(bytes(key), bytes(value)) for key, value in message["headers"]]
                elif message.get("body"):
                    yield bytes(message["body"])
            await task
        finally:
            task.cancel()

    async def fetch(self, path: str, body: bytes) -> bytes | None:
        """Return the body of the answer to a POST of the ingress itself; None where it is refused."""
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        key = self._state.config.operator_key or self._state.config.api_key
        if key is not None:
            headers.append((b"authorization", f"Bearer {key}".encode()))
        scope = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        parts, status = list[bytes](), 500
        async for item in self.handle(scope, body):
            if isinstance(item, bytes):
                parts.append(item)
            else:
                status = item[0]
        return b"".join(parts) if status == 200 else None

    # ---- called by Ray Serve ----

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return where the replica publishes its KV events, with an address that others reach."""
        source = self._llm.kv_event_source()
        if source is None:
            return {}
        for name in ("endpoint", "replay_endpoint"):
            if source[name] is not None:
                source[name] = source[name].replace("//0.0.0.0:", f"//{self._host}:")
        return {"events": source}

    def record_routing_stats(self) -> dict[str, float]:
        """Return how much the replica has to do."""
        health = self._llm.health()
        return {
            "num_running": float(health.num_running),
            "num_waiting": float(health.num_waiting),
            "queued_tokens": self._queued_tokens(),
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy looks at."""
        return {"queued_tokens": self._queued_tokens()}

    async def check_health(self) -> None:
        """Raise where the engine is dead or stuck, so that the replica is started again.

        Raises:
            WorkerError: it is.
        """
        health = self._llm.health()
        if not health.is_alive or health.is_stuck:
            raise WorkerError("the engine is dead" if not health.is_alive else "the engine is stuck")

    def __del__(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.shutdown()

    def _queued_tokens(self) -> float:
        """Return the tokens of the prompts that wait, possibly in the middle of a step."""
        waiting = tuple(self._llm._engine.scheduler.waiting)
        return float(sum(len(sequence.tokens) for sequence in waiting))
