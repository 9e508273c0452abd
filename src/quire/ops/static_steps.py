"""Decode steps whose inputs lie in static buffers, for backends whose kernels can be captured and replayed.

All that differs between two decode steps of the same number of rows lies in buffers on the device, whose addresses stay
the same, and what the host knows of a step is only written there. So the launches of one step, replayed, compute
another.

```
 StaticMemory   | ids | positions | slots | work items | ...   <- written on the host, copied together before a step
                | block tables |
```
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.ops.interface import AttentionBatch, PagedKV, StateBatch
from quire.ops.lora import LoraRows

CHUNK_BYTES: Final = 1 << 20
# Addresses of vectors that kernels load together.
ALIGNMENT: Final = 16


class StaticNumbers(NamedTuple):
    """Numbers that the host writes and kernels read; equal shapes.

    Args:
        host: numbers as they were written last.
        device: numbers as of the last `StaticMemory.upload`.
    """

    host: Tensor
    device: Tensor


class _Chunk:
    """Bytes on the host and on the device, taken from the front on."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.used = 0


class StaticMemory:
    """Static buffers on a device, and what is to be copied to them; all that was taken is copied together.

    Args:
        device: device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[_Chunk] = []
        self._apart: list[_Chunk] = []
        self._uploaded: torch.cuda.Event | None = None

    def take(self, count: int, dtype: torch.dtype) -> StaticNumbers:
        """Return zeros that are copied whole with each upload."""
        num_bytes = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if not self._chunks or self._chunks[-1].used + num_bytes > len(self._chunks[-1].host):
            self._chunks.append(_Chunk(max(num_bytes, CHUNK_BYTES), self._device))
        chunk = self._chunks[-1]
        part = slice(chunk.used, chunk.used + count * dtype.itemsize)
        chunk.used += num_bytes
        return StaticNumbers(chunk.host[part].view(dtype), chunk.device[part].view(dtype))

    def take_table(self, count: int, dtype: torch.dtype) -> StaticTable:
        """Return zeros of which an upload copies as many as are used."""
        chunk = _Chunk(count * dtype.itemsize, self._device)
        self._apart.append(chunk)
        return StaticTable(chunk, dtype)

    def upload(self) -> None:
        """Copy to the device what the host has written; the host does not wait."""
        for chunk in (*self._chunks, *self._apart):
            if chunk.used:
                chunk.device[: chunk.used].copy_(chunk.host[: chunk.used], non_blocking=True)
        if self._device.type == "cuda":
            self._uploaded = self._uploaded or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._uploaded.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait for the last upload: only then may the host write again, while the step before may still run."""
        if self._uploaded is not None:
            self._uploaded.synchronize()


class StaticTable:
    """Numbers of which only the first ones are used in a step.

    Attributes:
        host: numbers as they were written last.
        device: numbers as of the last upload.
    """

    def __init__(self, chunk: _Chunk, dtype: torch.dtype) -> None:
        self._chunk = chunk
        self.host, self.device = chunk.host.view(dtype), chunk.device.view(dtype)

    def __len__(self) -> int:
        return len(self.host)

    def write(self, numbers: Tensor) -> None:
        """Replace the numbers; they are copied with the next upload. The first ones of `host` lie there already."""
        if numbers.data_ptr() != self.host.data_ptr():
            # Not `len`, here and elsewhere in a step: of a tensor, that is a function of Python's.
            self.host[: numbers.numel()] = numbers
        self.use(numbers.numel())

    def use(self, count: int) -> None:
        """Have the first numbers of `host`, which were written there, copied with the next upload."""
        self._chunk.used = count * self.host.itemsize


def vector(numbers: Iterable[int]) -> Tensor:
    """Return int64 [n]: a tensor over an array is made in a fraction of the time that one of a list takes."""
    values = array("q", numbers)
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.zeros(0, dtype=torch.int64)


class StaticTokens(Protocol):
    """Decodes over one cache group of keys and values: one row a sequence.

    Attributes:
        block_ids: where block tables are; those of a step may be laid out there before it is written.
    """

    block_ids: StaticTable

    def batch(self, num_rows: int, shares: bool = False) -> AttentionBatch:
        """Return what `Ops.step_attention` takes for a step of some rows; its numbers are in static buffers.

        Args:
            num_rows: number of rows.
            shares: the step can read once what sequences share; see `share`.
        """

    def share(self, positions: Tensor, block_ids: Tensor, block_starts: Tensor, stamps: Sequence[int]) -> bool:
        """Find what the sequences of a step share; say whether a step that reads it once pays.

        Args:
            positions, block_ids, block_starts: see `write_tokens`.
            stamps: a number for each row, in a list that nobody changes. Where it is that of a row of an earlier step,
                the table of that row has been the beginning of this one.
        """

    def write_tokens(
        self, positions: Tensor, block_ids: Tensor, block_starts: Tensor, num_rows: int, shares: bool = False
    ) -> None:
        """Write a step of n rows, and rows after them that look at the null block only.

        Args:
            positions: int64 [n], position of each row in its sequence; on the host, as all here.
            block_ids: int64, block tables of the sequences, at any places, and 0 for the null block at the end.
            block_starts: int64 [n], where each table starts.
            num_rows: number of rows with those after them.
            shares: read once what `share` found for these rows; only for steps that can.
        """


@runtime_checkable
class StaticStates(Protocol):
    """Decodes over one cache group of states."""

    def batch(self, num_rows: int) -> StateBatch:
        """Return what `Ops.step_states` takes for a step of some rows; its numbers are in static buffers."""

    def write_states(
        self, block_ids: Sequence[int], has_state: Sequence[bool], num_rows: int, counts: Sequence[int] | None = None
    ) -> None:
        """Write a step of some sequences, and rows after theirs on the null block.

        Args:
            block_ids, has_state: see `StateBatch`.
            num_rows: number of rows with those after them.
            counts: number of rows of each sequence; None for one each.
        """


class StaticAdapters(Protocol):
    """Adapters of decodes: one row a sequence."""

    def rows(self, num_rows: int) -> LoraRows:
        """Return what a decoder takes for a step of some rows, whose adapters are in static buffers."""

    def takes(self, rows: LoraRows) -> bool:
        """Say whether the rows of a step that have adapters fit into the buffers of such a step, or of a larger one."""

    def write_adapters(self, rows: LoraRows | None, num_rows: int) -> None:
        """Write the rows of a step that have an adapter, which it takes; None for no such row."""


class StaticLimits(NamedTuple):
    """The largest step that static buffers hold.

    Args:
        num_rows: number of rows.
        num_blocks: entries of all block tables of a cache group together.
    """

    num_rows: int
    num_blocks: int


@runtime_checkable
class MakesStaticSteps(Protocol):
    """A backend whose kernels take decodes from static buffers."""

    def static_tokens(
        self, kv: PagedKV, window: int | None, chunk: int | None, memory: StaticMemory, limits: StaticLimits
    ) -> StaticTokens | None:
        """Return buffers for a cache group of keys and values; None where its kernels cannot take them."""

    def static_states(self, memory: StaticMemory, limits: StaticLimits) -> StaticStates:
        """Return buffers for a cache group of states."""

    def static_adapters(self, memory: StaticMemory, limits: StaticLimits) -> StaticAdapters:
        """Return buffers for the adapters of rows."""


@dataclass(frozen=True, slots=True)
class StaticAttentionBatch(AttentionBatch):
    """Decodes in static buffers: the fields of the base class that are numbers of the host have no meaning.

    Args:
        source: buffers of the cache group.
        shares: the step can read once what sequences share.
    """

    source: StaticTokens | None = None
    shares: bool = False


@dataclass(frozen=True, slots=True)
class StaticStateBatch(StateBatch):
    """Decodes in static buffers: the fields of the base class that are numbers of the host have no meaning.

    Args:
        source: buffers of the cache group.
    """

    source: StaticStates | None = None
