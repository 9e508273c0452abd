"""Threads for what event loops must not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from quire.errors import WorkerError

R = TypeVar("R")


class Threads:
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

    def begin(self, work: Callable[[], object]) -> None:
        """Do something in a thread that nobody waits for; nothing once the threads are closed."""
        with suppress(RuntimeError):
            self._threads.submit(work)

    def close(self) -> None:
        """Begin nothing more."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
