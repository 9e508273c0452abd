"""Merging of a request's output streams with the client's disconnect and the server's stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import cast

from starlette.types import Receive

from quire.engine.outputs.outputs import RequestOutput
from quire.errors import RequestError

# Index of a prompt, and its new output.
Delta = tuple[int, RequestOutput]


class ClientGone(Exception):
    """The client has closed the connection."""


def merge(outputs: dict[int, RequestOutput], idx: int, delta: RequestOutput) -> None:
    """Add a delta to the output of its prompt."""
    if idx in outputs:
        outputs[idx].add(delta)
    else:
        outputs[idx] = delta


class StreamMerger:
    """Merges the outputs of a request's prompts with the client's disconnect and the server's stop.

    The unread deltas of a prompt are merged into one, so that a slow client holds at most one output for each prompt.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._pending: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._num_ended = 0
        self._has_happened = asyncio.Event()
        self._is_reader_waiting = False
        # True once the engine has accepted all requests, so that none can be refused; only then silences are reported.
        self._are_added = False
        # True if a silence is to be reported; time of the last event or report.
        self._is_idle = False
        self._happened_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """True while the reader of `deltas` waits, and nothing has happened yet that ends its wait."""
        return self._is_reader_waiting and not self._has_happened.is_set()

    @property
    def has_client_left(self) -> bool:
        """True once the connection was closed; further output is discarded."""
        return isinstance(self._error, ClientGone)

    def touch(self) -> None:
        """Record that the client was sent data that `deltas` did not yield."""
        self._happened_s = asyncio.get_running_loop().time()

    def fail(self, error: Exception) -> None:
        """End the request with an error; the first error counts."""
        self._error = self._error or error
        self._has_happened.set()

    async def deltas(
        self,
        streams: Sequence[AsyncIterator[RequestOutput]],
        receive: Receive,
        has_added: Callable[[], Awaitable[bool]],
    ) -> AsyncGenerator[list[Delta], None]:
        """Yield the available deltas as soon as there are any, and an empty list after a silence.

        A silence counts once the engine has accepted the requests: until then one may still be refused, and data sent
        during a silence would have determined the status of the answer.

        At its end, from any cause (the last output, an error, the client, the caller), every stream is closed, and with
        it the engine's request.
        """
        tasks = [asyncio.create_task(self._pump(idx, stream)) for idx, stream in enumerate(streams)]
        tasks.append(asyncio.create_task(self._watch_client(receive)))
        tasks.append(asyncio.create_task(self._watch_silence(has_added)))
        is_over = False
        try:
            while not is_over:
                self._happened_s = asyncio.get_running_loop().time()
                self._is_reader_waiting = True
                await self._has_happened.wait()
                self._is_reader_waiting = False
                self._has_happened.clear()
                # A snapshot: events that happen while the caller sends belong to the next turn.
                deltas, self._pending = list(self._pending.items()), {}
                error, is_over = self._error, self._num_ended == len(streams)
                is_idle, self._is_idle = self._is_idle, False
                if isinstance(error, ClientGone):
                    raise error
                # `has_added` is False after a request has ended, but then its deltas have set the status.
                self._are_added = self._are_added or bool(deltas)
                if deltas or (is_idle and not is_over and error is None):
                    yield deltas
                if error is not None:
                    raise error
        finally:
            self._is_reader_waiting = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, idx: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(cast(AsyncGenerator[RequestOutput, None], stream)) as outputs:
                async for output in outputs:
                    merge(self._pending, idx, output)
                    self._has_happened.set()
        except Exception as error:
            if isinstance(error, RequestError):
                error.prompt_idx = idx
            self.fail(error)
        else:
            self._num_ended += 1
            self._has_happened.set()

    async def _watch_silence(self, has_added: Callable[[], Awaitable[bool]]) -> None:
        # One task for the whole stream: a timer for each delta would cost more than the delta.
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._happened_s + self._idle_s - loop.time())
            if loop.time() >= self._happened_s + self._idle_s:
                self._are_added = self._are_added or await has_added()
                self._happened_s = loop.time()
                if self._are_added:
                    self._is_idle = True
                    self._has_happened.set()

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGone())
