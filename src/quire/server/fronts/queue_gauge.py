"""The length of the waiting queue in memory that the engine's process writes and fronts read, without a message."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Final

NUM_BYTES: Final = mmap.PAGESIZE


class QueueGauge:
    """Two numbers, each read and written as a whole: taken slots of the waiting queue, and seconds until a retry."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, NUM_BYTES)
        self._numbers = memoryview(self._map).cast("q")

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new file, which has no name."""
        with tempfile.TemporaryFile() as file:
            file.truncate(NUM_BYTES)
            return os.dup(file.fileno())

    def write(self, num_taken: int, retry_after_s: int) -> None:
        """Set both numbers."""
        self._numbers[0], self._numbers[1] = num_taken, retry_after_s

    @property
    def num_taken(self) -> int:
        """Number of slots that are taken."""
        return self._numbers[0]

    @property
    def retry_after_s(self) -> int:
        """Whole seconds after which a refused client should try again."""
        return self._numbers[1]

    def close(self) -> None:
        """Unmap the memory."""
        self._numbers.release()
        self._map.close()
