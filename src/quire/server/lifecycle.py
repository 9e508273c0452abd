"""The life of a server: socket, engine, signals, and a shutdown that lets running requests finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from contextlib import closing
from typing import TYPE_CHECKING

from quire import __version__
from quire.config import EngineConfig
from quire.config.extras import check_extra
from quire.platform.bounded.json_text import limit_digits
from quire.platform.service_manager import notify
from quire.server.app import build_app
from quire.server.http.address import url_of
from quire.server.http.http_server import HttpServer, start_http
from quire.server.http.listener import read_max_connections
from quire.server.http.stop_signals import end_at_once, take_signals
from quire.server.operations.throughput_log import log_throughput
from quire.server.requests.body import BodyReader
from quire.server.requests.errors import stopping
from quire.server.settings import ServerConfig
from quire.server.state.state import ServerState
from quire.server.state.tracing import RequestTracer
from quire.text.reasoning import ReasoningModel, choose_reasoning_format
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tool_calls import ToolFormat, choose_format

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

# Time for which a server with a dead engine still answers clients and probes, before it exits for its supervisor.
DEAD_ENGINE_GRACE_S = 2.0
EXIT_ENGINE_DIED = 1


def serve(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> int:
    """Load a model and serve it until a stop signal arrives or the engine has died.

    Args:
        engine_config: options of the engine.
        config: options of the server.
        listener: bound socket.

    Returns:
        The exit code: 0, or `EXIT_ENGINE_DIED`.

    Raises:
        ConfigError: an option is unusable.
    """
    limit_digits()
    if config.otlp_traces_endpoint is not None:
        check_extra("otlp_traces_endpoint")
    max_connections = read_max_connections(config.max_connections)
    from quire.engine.async_llm import AsyncLLM

    tracer = None
    if config.otlp_traces_endpoint is not None:
        tracer = RequestTracer(config.otlp_traces_endpoint, __version__)
    llm = AsyncLLM.from_config(engine_config)
    # These objects live until the end: a full collection that visited them would stall every stream for 30 ms.
    gc.collect()
    gc.freeze()
    try:
        with (
            closing(make_state(llm, config, engine_config.model.served_names[1:])) as state,
            asyncio.Runner() as runner,
        ):
            runner.run(_serve_http(state, listener, max_connections, tracer))
    finally:
        llm.shutdown()
        if tracer is not None:
            tracer.close()
    return EXIT_ENGINE_DIED if llm.has_failed else 0


def make_state(llm: AsyncLLM, config: ServerConfig, aliases: tuple[str, ...]) -> ServerState:
    """Return the state of a server of a model, whose further names are `aliases`."""
    tool_format = _read_tool_format(llm.tokenizer, config.tool_call_parser)
    reasoning = _read_reasoning(llm.tokenizer, config.reasoning_parser, llm.texts.end_token_ids)
    # Every list of integers in a valid request is at most as long as the context or the vocabulary.
    limit = config.body_limit(reads_images=llm.texts.max_images > 0)
    bodies = BodyReader(limit, max(llm.resolved.max_model_len, llm.resolved.vocab_size))
    return ServerState(llm, config, bodies, __version__, int(time.time()), tool_format, reasoning, aliases)


def _read_tool_format(tokenizer: Tokenizer | None, wanted: str) -> ToolFormat | None:
    """Return and log the format of the model's tool calls; None if the model has no tools or no known format."""
    template = None if tokenizer is None else tokenizer.chat_template
    if template is None or not template.supports_tools:
        return None
    form, reason = choose_format(wanted, template)
    if form is None:
        logger.warning("Tool calls: %s; --tool-call-parser can set it", reason)
    else:
        source = reason if wanted == "auto" else "as --tool-call-parser says"
        logger.info("Tool calls: read in the format %s, %s", form.name, source)
    return form


def _read_reasoning(tokenizer: Tokenizer | None, wanted: str, end_token_ids: frozenset[int]) -> ReasoningModel | None:
    """Return and log the format of the model's thinking; None if it is unknown."""
    model = ReasoningModel.find(wanted, tokenizer, end_token_ids)
    if model is None or tokenizer is None or tokenizer.chat_template is None:
        return None
    found = choose_reasoning_format(wanted, tokenizer.chat_template)
    source = found.reason if wanted == "auto" else "as --reasoning-parser says"
    logger.info("Reasoning: read in the format %s, %s", model.form.name, source)
    if model.tokens is None:
        logger.warning("Reasoning: its markers are no tokens of the model, so grammars and budgets cannot follow it")
    return model


async def _serve_http(
    state: ServerState, listener: socket.socket, max_connections: int, tracer: RequestTracer | None
) -> None:
    """Serve HTTP on a bound socket until a shutdown ends; the socket is closed then."""
    llm, config = state.llm, state.config
    http = await start_http(build_app(state, tracer), config, listener, max_connections)
    shutdown = Shutdown(state, http)
    take_signals(shutdown.on_signal)
    print(said := f"Quire serves {llm.model_name} at {url_of(listener, config.scheme)}", flush=True)
    notify("READY=1", f"STATUS={said}")
    tasks = [http.accepting, http.watching, asyncio.create_task(_end_when_dead(state, shutdown))]
    if config.log_interval_s:
        tasks.append(asyncio.create_task(log_throughput(llm, config.log_interval_s)))
    if config.watch:
        from quire.server.operations.terminal_map import show_in_terminal

        tasks.append(asyncio.create_task(show_in_terminal(state.views.block_map)))
    for task in tasks:
        task.add_done_callback(shutdown.on_task_done)
    await http.serving
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _end_when_dead(state: ServerState, shutdown: Shutdown) -> None:
    while not state.llm.has_failed:
        await asyncio.sleep(0.1)
    logger.error("the engine has died, so the server ends in %g s", DEAD_ENGINE_GRACE_S)
    await asyncio.sleep(DEAD_ENGINE_GRACE_S)
    shutdown.end()


class Shutdown:
    """The shutdown of the server: the first signal drains it, the second one ends the process."""

    def __init__(self, state: ServerState, http: HttpServer) -> None:
        self._state = state
        self._http = http
        self._draining: asyncio.Task[None] | None = None

    def on_signal(self, number: int) -> None:
        """Handle a signal."""
        if self._draining is None:
            self.begin()
        else:
            end_at_once(number)

    def on_task_done(self, task: asyncio.Task[None]) -> None:
        """End the server if one of its tasks has failed."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("a task of the server has failed, so the server ends", exc_info=error)
        if self._draining is None:
            self.begin()

    def end(self) -> None:
        """Accept no more connections, and end the server after the open ones have their answers."""
        notify("STOPPING=1")
        self._http.server.should_exit = True
        self._http.accepting.cancel()

    def begin(self) -> None:
        """Take no new requests, let running ones finish within the time limit, and end the server."""
        notify("STOPPING=1")
        self._state.is_draining = True
        self._state.views.close()
        self._http.connections.drain()
        self._draining = asyncio.create_task(self._drain())
        self._draining.add_done_callback(self.on_task_done)

    async def _drain(self) -> None:
        """Let running requests finish within the time limit, fail the others, and end the server."""
        timeout_s = self._state.config.drain_timeout_s
        logger.info("stopping: requests may run for %g s more: %d", timeout_s, len(self._state.in_flight))
        loop = asyncio.get_running_loop()
        drain_by_s = loop.time() + timeout_s
        try:
            if not await self._state.llm.drain(timeout_s):
                for tracked in self._state.in_flight:
                    tracked.merger.fail(stopping())
            # Clients may still be reading long answers.
            if answering := set(self._http.server.server_state.tasks):
                await asyncio.wait(answering, timeout=max(drain_by_s - loop.time(), 0))
        finally:
            self.end()
