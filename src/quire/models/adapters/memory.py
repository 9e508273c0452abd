"""The GPU memory that adapters may take while an engine serves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

from torch import Tensor

from quire.errors import InvalidAdapter, OutOfAdapterMemory

# PyTorch allocates a GPU's memory in multiples of this.
UNIT_BYTES: Final = 512


class AdapterMemory:
    """The bytes of all adapters of a decoder on a GPU, and their limit; thread-safe.

    The memory of steps is not reserved in PyTorch's allocator: an adapter that took it would make the largest steps of
    other requests fail, and is refused instead.

    Attributes:
        make_room: function that gives up an adapter that nobody may need, and returns False where there is none.
    """

    def __init__(self) -> None:
        self.make_room: Callable[[], bool] = lambda: False
        self._lock = threading.RLock()  # reentrant, since garbage collection in a call gives bytes back
        self._taken = 0
        self._limit: int | None = None

    @property
    def taken(self) -> int:
        """Bytes that adapters take now."""
        return self._taken

    def allow(self, num_bytes: int) -> None:
        """Limit adapters to `num_bytes` more than they take now; before this call, there is no limit."""
        self._limit = self._taken + num_bytes

    def claim(self) -> MemoryClaim:
        """Return a claim for an adapter that is being packed."""
        return MemoryClaim(self)

    def take(self, num_bytes: int, of_one: int) -> None:
        """Take bytes.

        Args:
            num_bytes: the bytes.
            of_one: bytes that the same adapter has taken before.

        Raises:
            InvalidAdapter: the adapter takes more than all may.
            OutOfAdapterMemory: not so many are left.
        """
        while not self._fits(num_bytes):
            limit = f"the GPU has {self._limit:,} bytes for adapters beside the KV cache and the largest step"
            needed, advice = of_one + num_bytes, "start with a smaller gpu_memory_utilization"
            if self._limit is not None and needed > self._limit:
                raise InvalidAdapter(f"{limit}, and this one needs {needed:,}; {advice}", field="lora_path")
            if not self.make_room():
                raise OutOfAdapterMemory(
                    f"{limit}, of which {self._taken - of_one:,} are taken, and this one needs {needed:,}; unload "
                    f"another one, or {advice}",
                    field="lora_path",
                )

    def _fits(self, num_bytes: int) -> bool:
        """Take bytes if the limit allows, and return whether it does."""
        with self._lock:
            if self._limit is not None and self._taken + num_bytes > self._limit:
                return False
            self._taken += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Give bytes back."""
        with self._lock:
            self._taken -= num_bytes


class MemoryClaim:
    """The bytes of one adapter; a context manager that gives them back after an error."""

    def __init__(self, memory: AdapterMemory) -> None:
        self._memory, self._taken = memory, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.give_back()

    def take(self, num_bytes: int) -> None:
        """Take the minimum of bytes of an adapter before it is packed; see `AdapterMemory.take`."""
        self._memory.take(num_bytes, self._taken)
        self._taken += num_bytes

    def settle(self, *packed: Any) -> None:
        """Take the additional bytes of tensors in nested tuples and mappings; see `AdapterMemory.take`."""
        num_bytes = sum(-(-tensor.nbytes // UNIT_BYTES) * UNIT_BYTES for tensor in _tensors(packed))
        self.take(max(0, num_bytes - self._taken))

    def give_back(self) -> None:
        """Give all bytes back."""
        self._memory.give_back(self._taken)
        self._taken = 0

    def end_with(self, owner: object) -> None:
        """Give the bytes back when the owner is garbage-collected."""
        weakref.finalize(owner, self.give_back).atexit = False


def _tensors(packed: Any) -> Iterator[Tensor]:
    match packed:
        case Tensor():
            yield packed
        case tuple():
            for part in packed:
                yield from _tensors(part)
        case Mapping():
            for part in packed.values():
                yield from _tensors(part)
