"""Merging of the outputs of a request's prompts with the client's disconnect and the server's stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.types import Receive

from quire.engine.outputs.outputs import RequestOutput
from quire.errors import RequestError

# Index of a prompt, and its new output.
Delta = tuple[int, RequestOutput]
# Submits the request of a prompt, by its index, and returns the function that ends it early.
Submit = Callable[[int], Awaitable[Callable[[], None]]]


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
        self._take: Callable[[int, RequestOutput], bool] | None = None
        # Prompts whose requests have not ended, and functions that end those that are submitted.
        self._unfinished: set[int] = set()
        self._abandon: dict[int, Callable[[], None]] = {}
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

    def put(self, idx: int, item: RequestOutput | Exception) -> None:
        """Add the next delta of a prompt, or the error that ends its request; called on the event loop."""
        if isinstance(item, Exception):
            if isinstance(item, RequestError):
                item.prompt_idx = idx
            self._unfinished.discard(idx)
            self.fail(item)
            return
        if item.finished:
            self._unfinished.discard(idx)
        elif self._take is not None and self.is_waiting and self._take(idx, item):
            return
        merge(self._pending, idx, item)
        self._has_happened.set()

    async def deltas(
        self,
        num_prompts: int,
        submit: Submit,
        receive: Receive,
        has_added: Callable[[], Awaitable[bool]],
        take: Callable[[int, RequestOutput], bool] | None = None,
    ) -> AsyncGenerator[list[Delta], None]:
        """Yield the available deltas as soon as there are any, and an empty list after a silence.

        A silence counts once the engine has accepted the requests: until then one may still be refused, and data sent
        during a silence would have determined the status of the answer.

        At its end, from any cause (the last output, an error, the client, the caller), the engine's requests are ended.
        `submit` submits the request of a prompt, whose outputs go to `put`. `take` is called with each delta that comes
        while the reader waits; a delta for which it returns True is not yielded.
        """
        self._unfinished, self._take = set(range(num_prompts)), take
        work = (self._submit_all(num_prompts, submit), self._watch_client(receive), self._watch_silence(has_added))
        tasks = [*map(asyncio.create_task, work)]
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
                error, is_over = self._error, not self._unfinished
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
            for idx in self._unfinished & self._abandon.keys():
                self._abandon[idx]()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _submit_all(self, num_prompts: int, submit: Submit) -> None:
        for idx in range(num_prompts):
            try:
                self._abandon[idx] = await submit(idx)
            except Exception as error:
                self.put(idx, error)
                return

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
