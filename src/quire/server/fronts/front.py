"""A front as the engine's process sees it: a process, and the session with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.server.admission.in_flight import FirstTokenLog
from quire.server.fronts.engine_methods import EngineMethods
from quire.server.fronts.heartbeat import BUSY_HUNG_AFTER_S, HUNG_AFTER_S, Silence, processor_time_s
from quire.server.fronts.peer import Peer
from quire.server.fronts.session import FrontSession
from quire.server.state.request_log import FIELDS

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

PROGRAM = "quire.server.fronts.front_process"


class FrontHandle:
    """A front that was started."""

    def __init__(
        self,
        llm: AsyncLLM,
        number: int,
        process: asyncio.subprocess.Process,
        connected: socket.socket,
        methods: EngineMethods,
        first_tokens: FirstTokenLog,
        on_end: Callable[[FrontHandle, int], None],
    ) -> None:
        self.number = number
        self.started_s = time.monotonic()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        # Time without an answer, and time without any work.
        self._silence, self._idle = Silence(), Silence()
        self._used_s: float | None = None
        self._process = process
        self._on_end = on_end
        self._session = FrontSession(
            llm, connected, f"front {number}", methods, first_tokens, self._on_notice, self._on_silence
        )
        self._waiting = asyncio.create_task(self._wait())
        self._count_http: Callable[[list[Any]], None] = methods.count_http_requests

    @classmethod
    async def start(
        cls,
        llm: AsyncLLM,
        number: int,
        descriptors: tuple[int, int],
        methods: EngineMethods,
        first_tokens: FirstTokenLog,
        on_end: Callable[[FrontHandle, int], None],
    ) -> FrontHandle:
        """Start a process."""
        ours, theirs = socket.socketpair()
        with theirs:
            passed = (theirs.fileno(), *descriptors)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                PROGRAM,
                *map(str, passed),
                pass_fds=passed,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                # A terminal sends its signals to the engine's process only, which tells its fronts.
                start_new_session=True,
            )
        return cls(llm, number, process, ours, methods, first_tokens, on_end)

    @property
    def peer(self) -> Peer:
        """The process, for messages and calls."""
        return self._session.peer

    def welcome(self, welcome: Any) -> None:
        """Tell the process what it serves: the value that `make_welcome` returns."""
        self.peer.notify("welcome", welcome)

    def stop(self) -> None:
        """Let the process stop: take no new requests, and end when running ones have, within the time limit."""
        self.peer.notify("stop")

    def ping(self) -> None:
        """Ask the process for an answer, once it is ready, and end it where it has given none for too long."""
        silent_s, idle_s = self._silence.tick(), self._idle.tick()
        used_s = processor_time_s(self._process.pid)
        if used_s != self._used_s:
            self._used_s = used_s
            self._idle.end()
        if not self.ready.done():
            self._silence.end()
        elif silent_s > BUSY_HUNG_AFTER_S or min(silent_s, idle_s) > HUNG_AFTER_S:
            self.end_hung(silent_s)
        else:
            self.peer.notify("ping")

    def end_hung(self, silent_s: float) -> None:
        """Kill a process that does not answer; its end is then that of any front."""
        logger.error(
            "front %d hangs: it has not answered for %.1f s, so it is killed",
            self.number,
            silent_s,
            extra={FIELDS: {"event": "front_hung", "front": self.number, "silent_s": round(silent_s, 1)}},
        )
        self._silence.end()  # until it is gone
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _on_notice(self, kind: str, value: Any) -> None:
        if kind == "ready" and not self.ready.done():
            self.ready.set_result(None)
        elif kind == "pong":
            self._silence.end()
        elif kind == "http_requests":
            self._count_http(value)

    def _on_silence(self) -> None:
        """Take the end of the channel, after which the process can do nothing any more."""
        self._closing = asyncio.create_task(self._kill_late())

    async def _kill_late(self) -> None:
        try:
            async with asyncio.timeout(5.0):
                await self.ended.wait()
        except TimeoutError:
            logger.error("front %d has closed its channel but not ended, so it is killed", self.number)
            self.kill()

    async def _wait(self) -> None:
        exit_code = await self._process.wait()
        self._session.close()
        self.ended.set()
        self._on_end(self, exit_code)
