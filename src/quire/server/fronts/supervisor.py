"""Serving with front processes: this process has the engine and starts, watches and stops the fronts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from quire.config.extras import check_extra
from quire.config.options import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.platform.bounded.json_text import limit_digits
from quire.server.admission.in_flight import FirstTokenLog
from quire.server.fronts.engine_methods import EngineMethods
from quire.server.fronts.front import FrontHandle
from quire.server.fronts.heartbeat import PING_INTERVAL_S
from quire.server.fronts.queue_gauge import QueueGauge
from quire.server.fronts.welcome import make_welcome
from quire.server.http.address import url_of
from quire.server.http.http_server import FLUSH_TIMEOUT_S
from quire.server.kv_views.views import LocalViews
from quire.server.lifecycle import (
    DEAD_ENGINE_GRACE_S,
    EXIT_ENGINE_DIED,
    HANGUP,
    engine_tasks,
    take_signals,
)
from quire.server.settings import ServerConfig

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

# Time limits of a front's start, and of its end beside what it may wait for.
START_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 10.0
# Fronts that died within so short a time of their start, one after the other, end the server.
SHORT_LIFE_S: Final = 10.0
MAX_SHORT_LIVES: Final = 3
# Time limit of a front's answer with its requests in flight.
ASK_TIMEOUT_S: Final = 2.0


class FrontsFailed(QuireError):
    """Fronts that do not start, or die again and again."""


class Supervisor:
    """The fronts of one server."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, aliases: tuple[str, ...], listener: socket.socket) -> None:
        self._llm = llm
        self._config = config
        self._listener = listener
        # Made once: writing a large tokenizer holds the interpreter's lock, and a front may be replaced at any time.
        self._welcome = make_welcome(llm, config, aliases, int(time.time()))
        self._first_tokens = FirstTokenLog()
        self.views = LocalViews(llm, self._first_tokens)
        self._descriptor = QueueGauge.create()
        self._gauge = QueueGauge(self._descriptor)
        llm.submitter.watch_queue(self._gauge.write)
        self._methods = EngineMethods(llm, self.views, self._rows, self._http_requests, llm.submitter.publish_queue)
        self._numbers = itertools.count()
        self._fronts: set[FrontHandle] = set()
        self._num_short_lives = 0
        self._restarts: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._over = asyncio.Event()
        self._failure: FrontsFailed | None = None

    async def run(self) -> None:
        """Serve until a signal, the death of the engine, or fronts that die again and again."""
        take_signals(self._on_signal)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._start()
            print(f"Quire serves {self._llm.model_name} at {url_of(self._listener, self._config.scheme)}", flush=True)
            watching = [self._watch_engine(), self._watch_fronts()]
            tasks = [*map(asyncio.create_task, watching), *engine_tasks(self._llm, self.views, self._config)]
            await self._over.wait()
        except BaseException:
            self._stop()
            raise
        finally:
            self._is_stopping = True
            tasks += self._restarts
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()
        if self._failure is not None:
            raise self._failure

    async def _start(self) -> None:
        """Start all fronts, and wait until each accepts connections."""
        count = self._config.api_server_count
        started = await asyncio.gather(*(self._start_one() for _ in range(count)), return_exceptions=True)
        for error in started:
            if isinstance(error, BaseException):
                raise error

    async def _start_one(self) -> None:
        front = await FrontHandle.start(
            self._llm,
            next(self._numbers),
            (self._listener.fileno(), self._descriptor),
            self._methods,
            self._first_tokens,
            self._on_end,
        )
        self._fronts.add(front)
        front.welcome(self._welcome)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await front.ready
        except TimeoutError:
            front.kill()
            raise FrontsFailed(f"a front process was not ready within {START_TIMEOUT_S:g} s") from None
        if self._is_stopping:
            front.stop()

    def _on_end(self, front: FrontHandle, exit_code: int) -> None:
        """Take the end of a front: its requests have ended; another one is started unless the server stops."""
        self._fronts.discard(front)
        how = f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"
        if self._is_stopping or self._llm.has_failed:
            logger.debug("front %d has ended %s", front.number, how)
            return
        if not front.ready.done():
            front.ready.set_exception(FrontsFailed(f"a front process ended {how} before it was ready"))
            return
        is_short = time.monotonic() - front.started_s < SHORT_LIFE_S
        self._num_short_lives = self._num_short_lives + 1 if is_short else 0
        logger.error("front %d has ended %s; its connections are lost, and another one starts", front.number, how)
        if self._num_short_lives >= MAX_SHORT_LIVES:
            self._give_up(FrontsFailed(f"{MAX_SHORT_LIVES} front processes in a row ended within {SHORT_LIFE_S:g} s"))
        else:
            task = asyncio.create_task(self._restart())
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _restart(self) -> None:
        try:
            await self._start_one()
        except Exception as error:
            self._give_up(FrontsFailed(f"a front process could not be replaced: {error}"))

    def _give_up(self, failure: FrontsFailed) -> None:
        logger.error("%s, so the server ends", failure)
        self._failure = self._failure or failure
        self._stop()

    async def _watch_engine(self) -> None:
        """Tell the fronts when the engine has died; they say so for a while, and end."""
        while not self._llm.has_failed:
            await asyncio.sleep(0.1)
        logger.error("the engine has died, so the server ends in %g s", DEAD_ENGINE_GRACE_S)
        for front in self._fronts:
            front.peer.notify("failed", "the engine has died")
        self._over.set()

    async def _watch_fronts(self) -> None:
        """Ping the fronts, and end those that hang: their processes run, but do not answer."""
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            for front in tuple(self._fronts):
                front.ping()

    def _on_signal(self, number: int) -> None:
        if not self._is_stopping:
            logger.info("stopping: requests may run for %g s more", self._config.drain_timeout_s)
            self._stop()
        elif number != HANGUP:  # a closing terminal may send it twice
            for front in self._fronts:
                front.kill()
            os._exit(128 + number)

    def _stop(self) -> None:
        """Let every front stop: take no new requests, and end when running ones have, within the time limit."""
        self._is_stopping = True
        self.views.close()
        for front in self._fronts:
            front.stop()
        self._over.set()

    async def _end(self) -> None:
        """Wait for the ends of all fronts, and kill those that take too long."""
        limit_s = self._config.drain_timeout_s + FLUSH_TIMEOUT_S + END_TIMEOUT_S
        ends = [asyncio.create_task(front.ended.wait()) for front in self._fronts]
        if ends:
            _, late = await asyncio.wait(ends, timeout=limit_s)
            for task in late:
                task.cancel()
        for front in tuple(self._fronts):
            logger.error("front %d has not ended within %g s, so it is killed", front.number, limit_s)
            front.kill()
            await front.ended.wait()
        self._llm.submitter.watch_queue(None)
        self._gauge.close()
        os.close(self._descriptor)

    async def _rows(self) -> list[Any]:
        """Return the requests in flight of all fronts; one that does not answer in time has none."""
        return [row for rows in await self._ask("in_flight") for row in rows]

    async def _http_requests(self) -> None:
        """Let the fronts send the HTTP requests that they have answered."""
        await self._ask("http_requests")

    async def _ask(self, method: str) -> list[Any]:
        asked = (front.peer.call(method, timeout_s=ASK_TIMEOUT_S) for front in tuple(self._fronts))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def serve_with_fronts(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> int:
    """Load a model and serve it with front processes until a stop signal arrives or the engine has died.

    Args and returns are those of `quire.server.lifecycle.serve`.

    Raises:
        ConfigError: an option is unusable.
        FrontsFailed: see `Supervisor.run`.
    """
    limit_digits()
    if config.otlp_traces_endpoint is not None:
        check_extra("otlp_traces_endpoint")
    check_extra("api_server_count")
    if os.name != "posix":
        raise ConfigError(
            "api_server_count needs a POSIX system; 0 serves in the engine's process", field="api_server_count"
        )
    from quire.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_config(engine_config)

    async def run() -> None:
        with listener:
            await Supervisor(llm, config, engine_config.model.served_names[1:], listener).run()

    try:
        gc.collect()
        gc.freeze()
        with asyncio.Runner() as runner:
            runner.run(run())
    finally:
        llm.shutdown()
    return EXIT_ENGINE_DIED if llm.has_failed else 0
