"""A server from start to stop: socket, engine, signals, and the end in which nobody is cut off in time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time

import uvicorn

from quire import __version__
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.app import build_app
from quire.server.body import Bodies
from quire.server.errors import stopping
from quire.server.reports import report_for_ever
from quire.server.settings import ServerConfig
from quire.server.state import ServerState
from quire.text.tokenizer import Tokenizer
from quire.text.tool_calls import ToolFormat, choose_format

logger = logging.getLogger(__name__)

# What is left to send once the engine has finished: the last chunks.
FLUSH_TIMEOUT_S = 5
BACKLOG = 2048


def serve(engine_config: EngineConfig, config: ServerConfig) -> None:
    """Load a model and serve it until a signal says stop.

    Raises:
        ConfigError: an option that cannot be honoured, or an address that cannot be had.
    """
    # The address first: it fails in a moment; the engine's import takes seconds, the model maybe minutes.
    with bind(config.host, config.port) as listener:
        from quire.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_config(engine_config)
        # All this stays: a full collection that went through it too would hold every stream up for some 30 ms.
        gc.collect()
        gc.freeze()
        # No list of integers that a request can use is longer.
        bodies = Bodies(config.max_body_bytes, max(llm.resolved.max_model_len, llm.resolved.vocab_size))
        try:
            form = _tool_format(llm.tokenizer, config.tool_call_parser)
            state = ServerState(llm, config, bodies, __version__, created=int(time.time()), tool_format=form)
            settings = uvicorn.Config(
                build_app(state),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
            )
            with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
                runner.run(_run(state, uvicorn.Server(settings), listener))
        finally:
            bodies.close()
            llm.shutdown()


def _tool_format(tokenizer: Tokenizer | None, wanted: str) -> ToolFormat | None:
    """Return how the model writes calls of tools, and say so; None where it knows no tools, or that is not known."""
    template = None if tokenizer is None else tokenizer.chat_template
    if template is None or not template.knows_tools:
        return None
    form = choose_format(wanted, template.for_tools.source)
    if form is None:
        logger.warning("Tool calls: the chat template does not show the format; --tool-call-parser can say it")
    else:
        found = "as the chat template shows" if wanted == "auto" else "as --tool-call-parser says"
        logger.info("Tool calls: read in the format %s, %s", form.name, found)
    return form


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that has the address but does not listen yet; clients are turned away until the model is there.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}", field="port") from error
    return listener


async def _run(state: ServerState, server: uvicorn.Server, listener: socket.socket) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    stop = _Stop(state, server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.on_signal, number)
    print(f"Quire serves {state.llm.model_name} at {_url(listener)}", flush=True)
    reporting = None
    if state.config.log_interval_s:
        reporting = asyncio.create_task(report_for_ever(state.llm, state.config.log_interval_s))
    await serving
    if reporting is not None:
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting


class _Stop:
    """What signals do: the first one drains, the second one ends the process."""

    def __init__(self, state: ServerState, server: uvicorn.Server) -> None:
        self._state = state
        self._server = server
        self._draining: asyncio.Task[None] | None = None

    def on_signal(self, number: int) -> None:
        """Take a signal."""
        if self._draining is not None:
            os._exit(128 + number)
        self._state.is_draining = True
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Let what runs finish, tell the rest, and end the server."""
        timeout_s = self._state.config.drain_timeout_s
        logger.info("stopping: %d requests may run for %g s more", len(self._state.flights), timeout_s)
        try:
            if not await self._state.llm.drain(timeout_s):
                for flight in self._state.flights.values():
                    flight.feed.fail(stopping())
        finally:
            self._server.should_exit = True


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
