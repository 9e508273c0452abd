"""Threads for work that must not block event loops."""

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
    """A fixed number of threads, each with one task at a time; further tasks wait.

    Args:
        count: number of threads.
        name: prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._is_closed = False

    async def run(self, work: Callable[[], R]) -> R:
        """Run `work` in a thread and return its result.

        Raises:
            WorkerError: the threads were closed before `work` began.
        """
        try:
            return await asyncio.wrap_future(self._threads.submit(work))
        except (RuntimeError, asyncio.CancelledError) as error:
            if not self._is_closed:
                raise
            raise WorkerError("the engine was shut down") from error

    def give_back_soon(self) -> None:
        """Return freed memory to the system after `GIVE_BACK_S`, when most objects of recent tasks are freed."""
        asyncio.get_running_loop().call_later(GIVE_BACK_S, self.give_back)

    def give_back(self) -> None:
        """Return free memory of all arenas, including a worker thread's, to the system."""
        with suppress(RuntimeError):  # the threads were closed
            self._threads.submit(return_freed_memory)

    def close(self) -> None:
        """Cancel waiting tasks, and end the threads."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
