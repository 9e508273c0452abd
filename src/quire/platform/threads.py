"""Threads for what event loops must not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from quire.errors import WorkerError
from quire.platform.malloc import return_freed_memory

GIVE_BACK_S = 1.0

R = TypeVar("R")


class WorkerThreads:
    """So many threads that do one thing each at a time; who comes then waits.

    Args:
        count: how many there are.
        name: of all of them.
    """

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._is_closed = False

    async def run(self, work: Callable[[], R]) -> R:
        """Do something in a thread, and return what comes of it.

        Raises:
            WorkerError: the threads were closed before it began.
        """
        try:
            return await asyncio.wrap_future(self._threads.submit(work))
        except (RuntimeError, asyncio.CancelledError) as error:
            if not self._is_closed:
                raise
            raise WorkerError("the engine was shut down") from error

    def give_back_soon(self) -> None:
        """Give memory back to the system a little later: what was large and went through here is mostly gone then."""
        asyncio.get_running_loop().call_later(GIVE_BACK_S, self.give_back)

    def give_back(self) -> None:
        """Give memory that is free in a thread's part of the heap, and elsewhere, back to the system."""
        with suppress(RuntimeError):  # there are no threads any more
            self._threads.submit(return_freed_memory)

    def close(self) -> None:
        """Begin nothing more."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
