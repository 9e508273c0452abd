"""Calls between two processes over a channel: each end calls methods of the other, by name, with JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quire.errors import NoAnswer, WorkerError
from quire.server.fronts.channel import Channel
from quire.server.fronts.messages import Message, MethodCall, MethodResult, Notice, decode, encode
from quire.server.fronts.wire_errors import decode_error, encode_error

logger = logging.getLogger(__name__)

Method = Callable[..., Awaitable[Any]]


class Peer:
    """The process at the other end of a channel."""

    def __init__(
        self,
        connected: socket.socket,
        name: str,
        methods: Mapping[str, Method],
        on_message: Callable[[Message], None],
        on_notice: Callable[[str, Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self._name = name
        self._methods = methods
        self._on_message = on_message
        self._on_notice = on_notice
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self.is_gone = False
        self._channel = Channel(connected, self._take, self._end)

    def send(self, message: Message) -> None:
        """Send a message; may be called from any thread."""
        self._channel.send(encode(message))

    def notify(self, kind: str, value: Any = None) -> None:
        """Send a notice."""
        self.send(Notice(kind, json.dumps(value)))

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the other process and return its result."""
        if self.is_gone:
            raise self.gone()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(MethodCall(number, method, json.dumps(args)))
            async with asyncio.timeout(timeout_s):
                return json.loads(await answer)
        except TimeoutError as error:
            raise NoAnswer(self._name, timeout_s or 0.0) from error
        finally:
            del self._waiting[number]

    def gone(self) -> WorkerError:
        """Return the error of calls to a process that is gone."""
        return WorkerError(f"{self._name} has ended")

    def close(self) -> None:
        """Close the channel; running methods are cancelled."""
        self.is_gone = True
        self._channel.close()
        for task in tuple(self._running):
            task.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.gone())

    def _take(self, data: memoryview) -> None:
        message: Message = decode(data)
        if isinstance(message, MethodResult):
            self._resolve(message)
        elif isinstance(message, MethodCall):
            task = asyncio.get_running_loop().create_task(self._run(message))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        elif isinstance(message, Notice):
            self._on_notice(message.kind, json.loads(message.value))
        else:
            self._on_message(message)

    async def _run(self, call: MethodCall) -> None:
        """Run a method for the other process, and send its result or its error."""
        try:
            result = json.dumps(await self._methods[call.method](*json.loads(call.args)))
        except Exception as error:
            self.send(MethodResult(call.number, None, encode_error(error)))
        else:
            self.send(MethodResult(call.number, result, None))

    def _resolve(self, answer: MethodResult) -> None:
        waiting = self._waiting.get(answer.number)
        if waiting is None or waiting.done():
            return
        if answer.error is not None:
            waiting.set_exception(decode_error(answer.error))
        else:
            waiting.set_result(answer.result or "null")

    def _end(self) -> None:
        self.close()
        self._on_end()
