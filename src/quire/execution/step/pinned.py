"""Asynchronous copies between the host and a GPU, through pinned memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from quire.ops.interface.static_steps import vector

logger = logging.getLogger(__name__)


def placed(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, asynchronously from pinned memory."""
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


def select_rows(x: Tensor, rows: Iterable[int]) -> Tensor:
    """Return rows of a tensor; the host does not wait, as it would for `x[rows]` on a GPU."""
    return x.index_select(0, placed(vector(rows), x.device))


def pinned_bytes(num_bytes: int) -> Tensor:
    """Return pinned (page-locked) memory of exactly this size, uint8 [num_bytes].

    The pinned allocator of torch rounds up to a power of two, so 65 GiB would take 128.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if not num_bytes:
        return memory
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if error:
        logger.warning("%d bytes of the host cannot be registered (CUDA error %d): torch pins them", num_bytes, error)
        with suppress(RuntimeError):  # CUDA reports the error again at the next launch: here, not in a step
            torch.ones(1, device="cuda")
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    # Not at exit: the end of the process unpins all memory.
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


class HostCopy:
    """An asynchronous copy of a tensor to the host, queued on the stream; the host waits only when it reads it."""

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            # Queued now: a copy queued at the time of reading would wait for the kernels of the next step.
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_ready(self) -> bool:
        """True once the copy is done."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Wait for the copy, and return it as a tensor."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor

    def tolist(self) -> Any:
        """Wait for the copy, and return it as a list."""
        return self.wait().tolist()
