"""The GPU that kernels are launched on, as far as their sizes depend on it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Final, get_args

import torch
from torch import Tensor

from quire.ops.interface import Activation
from quire.ops.triton.tiles import DEFAULT_CAPABILITY

# Activations as kernels number them: in the order of `SILU` and others in kernels/rows.py.
ACTIVATIONS: Final = {name: number for number, name in enumerate(get_args(Activation))}
# Processors that the interpreter is given: few, so that short contexts are split too.
INTERPRETED_PROCESSORS: Final = 2
# Bytes that a GPU reads while it launches a kernel: 2.5 us at 3.3 TB/s. What saves less is not worth one.
LAUNCH_BYTES: Final = 8 << 20
# Rows up to which a state goes through a sequence row by row: as many take the time of two launches and a chunk for the
# delta rule on an H200, and some ten fewer for Mamba 2 (docs/lab/triton-on-an-h200.md).
SINGLE_ROWS: Final = 31


class Device:
    """The device of a backend.

    Args:
        device: a GPU, or the CPU for the interpreter.

    Attributes:
        capability: compute capability.
        num_processors: number of streaming multiprocessors.
        launch_bytes: bytes that must be saved for one launch more; the interpreter saves any.
        single_rows: rows of a sequence up to which a state goes through it row by row, and not in chunks.
        overlapping: constants and options of launches that may overlap with the kernel before; see kernels/overlap.py.
    """

    __slots__ = ("capability", "is_gpu", "launch_bytes", "num_processors", "overlapping", "single_rows", "torch_device")

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.is_gpu = device.type == "cuda"
        self.capability, self.num_processors = DEFAULT_CAPABILITY, INTERPRETED_PROCESSORS
        self.single_rows = SINGLE_ROWS
        self.launch_bytes: float = LAUNCH_BYTES if self.is_gpu else 0
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(device)
            self.capability = (properties.major, properties.minor)
            self.num_processors = properties.multi_processor_count
        self.overlapping: dict[str, bool] = {"OVERLAPS": False}
        if self.is_gpu and self.capability >= (9, 0):
            self.overlapping = {"OVERLAPS": True, "launch_pdl": True}

    def numbers(self, values: Iterable[int]) -> Tensor:
        """Return numbers as int32 on the device; see `placed`."""
        return self.placed(torch.tensor(array("i", values), dtype=torch.int32))

    def placed(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device: one copy, which the host does not wait for."""
        return tensor.pin_memory().to(self.torch_device, non_blocking=True) if self.is_gpu else tensor

    def sections(self, *parts: Sequence[int]) -> list[Tensor]:
        """Return lists of numbers as int32 on the device, by one copy, each from a multiple of 16 bytes on.

        A kernel is compiled anew for tensors that begin elsewhere.
        """
        padded = [[*part, *(0,) * (-len(part) % 4)] for part in parts]
        numbers = self.numbers(chain.from_iterable(padded))
        starts = accumulate(map(len, padded), initial=0)
        return [numbers[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins at a multiple of 16 bytes, as kernels are told of addresses that they load."""
    return tensor.data_ptr() % 16 == 0
