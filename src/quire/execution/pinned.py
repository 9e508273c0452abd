"""Copies between the host and a GPU that the host does not wait for."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def placed(numbers: Tensor, device: torch.device) -> Tensor:
    """Return numbers of the host on a device: one copy, which the host does not wait for."""
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


def pinned_bytes(num_bytes: int) -> Tensor:
    """Return memory of the host that a GPU copies from and to by itself, uint8 [num_bytes], and no more than that.

    The allocator of torch rounds pinned memory up to a power of two, so 65 GiB would take 128.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if not num_bytes:
        return memory
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if error:
        logger.warning("%d bytes of the host cannot be registered (CUDA error %d): torch pins them", num_bytes, error)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    # Not at the end of the process, which frees all of it.
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


class HostCopy:
    """A copy of a tensor for the host, which is made when the device gets there; the host waits once it reads it.

    Args:
        tensor: tensor on any device; nothing writes to it afterwards.
    """

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            # The copy is queued here: behind it are the kernels of the next step, for which the host would wait too.
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_ready(self) -> bool:
        """True once the numbers are there."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Return the copy; wait until the numbers are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor

    def tolist(self) -> Any:
        """Return the numbers; wait until they are there."""
        return self.wait().tolist()
