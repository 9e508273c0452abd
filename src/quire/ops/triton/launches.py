"""Properties of the GPU on which tile sizes and launches depend, and copies of host values to it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Final, get_args

import torch
from torch import Tensor

from quire.ops.interface.ops import Activation
from quire.ops.triton.tiles import DEFAULT_CAPABILITY

# Numbers of activations in kernels: `SILU` and others in kernels/rows.py.
ACTIVATIONS: Final = {name: number for number, name in enumerate(get_args(Activation))}
# Number of SMs that the interpreter pretends to have: few, so that short contexts are split too.
INTERPRETED_PROCESSORS: Final = 2
# Bytes that a GPU reads in the time of a kernel launch, 2.5 us at 3.3 TB/s: a launch must save more than that.
LAUNCH_BYTES: Final = 8 << 20
# Maximum number of rows of a sequence that are scanned row by row: on an H200 that takes as long as two launches and a
# chunk for the delta rule; for Mamba 2 the break-even is some ten rows lower (docs/lab/triton-on-an-h200.md).
SINGLE_ROWS: Final = 31


class Device:
    """The device of a backend."""

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
        """Return integers as an int32 tensor on the device; see `placed`."""
        return self.placed(torch.tensor(array("i", values), dtype=torch.int32))

    def placed(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the host to the device, asynchronously from pinned memory."""
        return tensor.pin_memory().to(self.torch_device, non_blocking=True) if self.is_gpu else tensor

    def sections(self, *parts: Sequence[int]) -> list[Tensor]:
        """Return lists of integers as int32 tensors on the device, by one copy, each aligned to 16 bytes.

        A kernel would be recompiled for unaligned tensors.
        """
        padded = [[*part, *(0,) * (-len(part) % 4)] for part in parts]
        numbers = self.numbers(chain.from_iterable(padded))
        starts = accumulate(map(len, padded), initial=0)
        return [numbers[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor is aligned to 16 bytes, which kernels assume of pointers that they load from memory."""
    return tensor.data_ptr() % 16 == 0
