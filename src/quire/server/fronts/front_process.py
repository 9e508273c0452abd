"""The program of a front: `python -m quire.server.fronts.front_process CHANNEL LISTENER GAUGE`, started by the server.

The arguments are descriptors: of the socket to the engine's process, of the listening socket that all fronts share, and
of the memory with the length of the waiting queue.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from typing import Any

from quire.errors import QuireError, WorkerError
from quire.platform.bounded.json_text import limit_digits
from quire.server.admission.in_flight import RequestsInFlight
from quire.server.fronts.heartbeat import PING_INTERVAL_S, Silence
from quire.server.fronts.messages import Message
from quire.server.fronts.peer import Peer
from quire.server.fronts.queue_gauge import QueueGauge
from quire.server.fronts.remote_engine import RemoteEngine
from quire.server.fronts.remote_views import RemoteViews
from quire.server.fronts.welcome import Welcome, read_welcome
from quire.server.http.listener import read_max_connections
from quire.server.lifecycle import Shutdown, read_reasoning, read_tool_format, run_http
from quire.server.requests.body import BodyReader
from quire.server.state.log_setup import set_up_log
from quire.server.state.state import ServerState
from quire.server.state.tracing import RequestTracer

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
# The engine's process has its model by the time it starts fronts.
WELCOME_TIMEOUT_S = 60.0


class Front:
    """One front."""

    def __init__(self, channel: socket.socket, listener: socket.socket, gauge: QueueGauge) -> None:
        self._channel = channel
        self._listener = listener
        self._gauge = gauge
        self._in_flight = RequestsInFlight()
        self._silence = Silence()
        self._engine: RemoteEngine | None = None
        self._shutdown: Shutdown | None = None
        self._is_stopping = False
        self._exit_code = 0

    async def run(self) -> int:
        """Serve until the engine's process says so, or is gone; return the exit code."""
        welcomed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def on_notice(kind: str, value: Any) -> None:
            if kind == "welcome":
                welcomed.set_result(value)
            elif kind == "stop":
                self._stop()
            elif kind == "failed":
                self._fail(WorkerError(value))
            elif kind == "ping":
                self._silence.end()
                peer.notify("pong")

        def on_end() -> None:
            if not welcomed.done():
                welcomed.set_exception(WorkerError("the engine's process has ended"))
            self._fail(WorkerError("the engine's process has ended"))

        async def send_http_requests() -> None:
            # A notice counts even where it comes too late for whoever has asked.
            if self._engine is not None:
                peer.notify("http_requests", self._engine.take_http_requests())

        methods = {"in_flight": self._rows, "http_requests": send_http_requests}
        peer = Peer(self._channel, "the engine's process", methods, self._take, on_notice, on_end)
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                welcome = read_welcome(await welcomed)
            await self._serve(peer, welcome)
            await send_http_requests()
        finally:
            peer.close()
        return self._exit_code

    async def _serve(self, peer: Peer, welcome: Welcome) -> None:
        set_up_log(welcome.log_level, is_json=welcome.is_log_json)
        config = welcome.config
        engine = self._engine = RemoteEngine(peer, welcome, self._gauge)
        resolved = welcome.resolved
        bodies = BodyReader(config.max_body_bytes, max(resolved.max_model_len, resolved.vocab_size))
        tracer = None
        if config.otlp_traces_endpoint is not None:
            tracer = RequestTracer(config.otlp_traces_endpoint, welcome.version)
        views = RemoteViews(peer, config.ping_interval_s)
        try:
            state = ServerState(
                engine,
                views,
                self._in_flight,
                config,
                bodies,
                welcome.version,
                welcome.created,
                aliases=welcome.aliases,
            )
            state.tool_format = read_tool_format(engine.tokenizer, config.tool_call_parser)
            state.reasoning = read_reasoning(engine.tokenizer, config.reasoning_parser, engine.texts.end_token_ids)
            gc.collect()
            gc.freeze()

            def on_start(shutdown: Shutdown) -> list[asyncio.Task[None]]:
                self._shutdown = shutdown
                peer.notify("ready")
                if self._is_stopping:
                    self._stop()
                self._silence.end()
                return [asyncio.create_task(self._watch_engine(engine))]

            # Their limits together are the server's.
            wanted = config.max_connections
            limit = read_max_connections(None if wanted is None else wanted // config.api_server_count)
            await run_http(state, self._listener, limit, tracer, on_start)
        finally:
            bodies.close()
            engine.texts.close()
            if engine.tokenizer is not None:
                engine.tokenizer.close()
            if tracer is not None:
                tracer.close()

    async def _watch_engine(self, engine: RemoteEngine) -> None:
        """Let the engine's client know for how long its process has been silent."""
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            engine.silent_s = self._silence.tick()

    async def _rows(self) -> list[Any]:
        return list(self._in_flight.rows())

    def _take(self, message: Message) -> None:
        assert self._engine is not None
        self._engine.take(message)

    def _stop(self) -> None:
        self._is_stopping = True
        shutdown, self._shutdown = self._shutdown, None
        if shutdown is not None:
            shutdown.begin()

    def _fail(self, error: WorkerError) -> None:
        """Let requests fail, and the server end after a while in which clients and probes are told so."""
        self._exit_code = EXIT_FAILED
        if self._engine is not None:
            self._engine.fail(error)


def main() -> int:
    """Run a front; return its exit code."""
    # The server's process handles signals, and tells its fronts; a terminal may send them to all.
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.SIG_IGN)
    limit_digits()
    channel, listener, gauge = map(int, sys.argv[1:])
    try:
        front = Front(socket.socket(fileno=channel), socket.socket(fileno=listener), QueueGauge(gauge))
        os.close(gauge)
        with asyncio.Runner() as runner:
            return runner.run(front.run())
    except (QuireError, TimeoutError) as error:
        logger.error("a front cannot serve: %s", error)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
