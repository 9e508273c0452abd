"""Decode steps with inputs in static (persistent) buffers, for backends whose kernels can be captured and replayed.

All values that differ between two decode steps of the same number of rows are in device buffers with fixed addresses;
the host passes a step's values only by writing them there. So captured launches can be replayed for other steps.

```
 StaticMemory   | ids | positions | slots | work items | ...   <- written in pinned memory, one copy before a step
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

from quire.ops.interface.lora import LoraRows
from quire.ops.interface.ops import AttentionBatch, PagedKV, StateBatch

CHUNK_BYTES: Final = 1 << 20
# Alignment of buffers in bytes, for vector loads in kernels.
ALIGNMENT: Final = 16


class StaticNumbers(NamedTuple):
    """A buffer that the host writes and kernels read: two tensors of equal shape.

    Args:
        host: values that the host wrote last.
        device: values as of the last `StaticMemory.upload`.
    """

    host: Tensor
    device: Tensor


class _Chunk:
    """Bytes on the host (pinned) and on the device, allocated from the front on."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.used = 0


class StaticMemory:
    """Static buffers on a device and their staging buffers on the host; an upload copies all of them.

    Args:
        device: device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[_Chunk] = []
        self._apart: list[_Chunk] = []
        self._uploaded: torch.cuda.Event | None = None

    def take(self, count: int, dtype: torch.dtype) -> StaticNumbers:
        """Return a zeroed buffer that each upload copies whole."""
        num_bytes = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if not self._chunks or self._chunks[-1].used + num_bytes > len(self._chunks[-1].host):
            self._chunks.append(_Chunk(max(num_bytes, CHUNK_BYTES), self._device))
        chunk = self._chunks[-1]
        part = slice(chunk.used, chunk.used + count * dtype.itemsize)
        chunk.used += num_bytes
        return StaticNumbers(chunk.host[part].view(dtype), chunk.device[part].view(dtype))

    def take_table(self, count: int, dtype: torch.dtype) -> StaticTable:
        """Return a zeroed buffer of which an upload copies only the used front."""
        chunk = _Chunk(count * dtype.itemsize, self._device)
        self._apart.append(chunk)
        return StaticTable(chunk, dtype)

    def upload(self) -> None:
        """Copy the host's buffers to the device, asynchronously."""
        for chunk in (*self._chunks, *self._apart):
            if chunk.used:
                chunk.device[: chunk.used].copy_(chunk.host[: chunk.used], non_blocking=True)
        if self._device.type == "cuda":
            self._uploaded = self._uploaded or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._uploaded.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait for the last upload: only then may the host write again; the previous step may still run."""
        if self._uploaded is not None:
            self._uploaded.synchronize()


class StaticTable:
    """A buffer of which a step uses only the first elements.

    Attributes:
        host: values that the host wrote last.
        device: values as of the last upload.
    """

    def __init__(self, chunk: _Chunk, dtype: torch.dtype) -> None:
        self._chunk = chunk
        self.host, self.device = chunk.host.view(dtype), chunk.device.view(dtype)

    def __len__(self) -> int:
        return len(self.host)

    def write(self, numbers: Tensor) -> None:
        """Replace the contents, which the next upload copies. `numbers` may be a view of the front of `host`."""
        if numbers.data_ptr() != self.host.data_ptr():
            # Not `len`, here and elsewhere in a step: `Tensor.__len__` is a Python function, and slower.
            self.host[: numbers.numel()] = numbers
        self.use(numbers.numel())

    def use(self, count: int) -> None:
        """Mark the first `count` elements of `host`, which have been written, for the next upload."""
        self._chunk.used = count * self.host.itemsize


def vector(numbers: Iterable[int]) -> Tensor:
    """Return integers as int64 [n]: building a tensor on an `array` takes a fraction of the time of one from a list."""
    values = array("q", numbers)
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.zeros(0, dtype=torch.int64)


class StaticTokens(Protocol):
    """Decodes over one cache group of keys and values, one row per sequence.

    Attributes:
        block_ids: buffer of the block tables; a caller may lay out a step's tables in it before `write_tokens`.
    """

    block_ids: StaticTable

    def batch(self, num_rows: int, shares: bool = False) -> AttentionBatch:
        """Return the batch that `Ops.step_attention` takes for a step of `num_rows` rows, on the static buffers.

        Args:
            num_rows: number of rows.
            shares: the step can read shared prefixes once; see `share`.
        """

    def share(self, positions: Tensor, block_ids: Tensor, block_starts: Tensor, stamps: Sequence[int]) -> bool:
        """Find the prefixes that sequences of a step share; say whether reading them once pays.

        Args:
            positions, block_ids, block_starts: see `write_tokens`.
            stamps: version of each row's block table, in a list that is never changed. If a row of an earlier step had
                the same stamp, its table was a prefix of this one.
        """

    def write_tokens(
        self, positions: Tensor, block_ids: Tensor, block_starts: Tensor, num_rows: int, shares: bool = False
    ) -> None:
        """Write a step of n rows, and padding rows after them that read the null block only.

        Args:
            positions: int64 [n], position of each row in its sequence; on the host, as all arguments.
            block_ids: int64, block tables of the sequences, at any offsets, then a 0, the null block.
            block_starts: int64 [n], offset of each row's table.
            num_rows: number of rows including padding.
            shares: read the prefixes that `share` found for these rows once; only for steps that can.
        """


@runtime_checkable
class StaticStates(Protocol):
    """Decodes over one cache group of states."""

    def batch(self, num_rows: int) -> StateBatch:
        """Return the batch that `Ops.step_states` takes for a step of `num_rows` rows, on the static buffers."""

    def write_states(
        self, block_ids: Sequence[int], has_state: Sequence[bool], num_rows: int, counts: Sequence[int] | None = None
    ) -> None:
        """Write a step of some sequences, and padding rows after theirs on the null block.

        Args:
            block_ids, has_state: see `StateBatch`.
            num_rows: number of rows including padding.
            counts: number of rows of each sequence; None if each has one.
        """


class StaticAdapters(Protocol):
    """Adapters of decodes, one row per sequence."""

    def rows(self, num_rows: int) -> LoraRows:
        """Return the adapter rows that a decoder takes for a step of `num_rows` rows, on the static buffers."""

    def takes(self, rows: LoraRows) -> bool:
        """Say whether the rows of a step that have adapters fit into the buffers of a step of that size or larger."""

    def write_adapters(self, rows: LoraRows | None, num_rows: int) -> None:
        """Write the rows of a step that have an adapter, which `takes` accepted; None if no row has one."""


class StaticLimits(NamedTuple):
    """The largest step that static buffers hold.

    Args:
        num_rows: number of rows.
        num_blocks: total number of entries of the block tables of a cache group.
    """

    num_rows: int
    num_blocks: int


@runtime_checkable
class MakesStaticSteps(Protocol):
    """A backend whose kernels can read decode steps from static buffers."""

    def static_tokens(
        self, kv: PagedKV, window: int | None, chunk: int | None, memory: StaticMemory, limits: StaticLimits
    ) -> StaticTokens | None:
        """Return buffers for a cache group of keys and values; None if the backend's kernels do not support it."""

    def static_states(self, memory: StaticMemory, limits: StaticLimits) -> StaticStates:
        """Return buffers for a cache group of states."""

    def static_adapters(self, memory: StaticMemory, limits: StaticLimits) -> StaticAdapters:
        """Return buffers for the adapters of rows."""


@dataclass(frozen=True, slots=True)
class StaticAttentionBatch(AttentionBatch):
    """Decodes in static buffers: the host-side fields of the base class have no meaning.

    Args:
        source: buffers of the cache group.
        shares: the step can read shared prefixes once.
    """

    source: StaticTokens | None = None
    shares: bool = False


@dataclass(frozen=True, slots=True)
class StaticStateBatch(StateBatch):
    """Decodes in static buffers: the host-side fields of the base class have no meaning.

    Args:
        source: buffers of the cache group.
    """

    source: StaticStates | None = None
