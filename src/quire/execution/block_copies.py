"""Blocks in host memory, and the movements of blocks within and between the tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.execution.kv_storage import Storage
from quire.execution.pinned import HostCopy, pinned_bytes, placed
from quire.kvstore.arriving import ArrivingBytes
from quire.kvstore.disk_blocks import DiskBlocks
from quire.memory.results import BlockCopy, StoredBlock, Tier

# Large enough that caches do not inflate the rate, small enough that loading is not slower.
CALIBRATION_BYTES = 32 << 20


class BlockCopier:
    """Every block of every tier as a row of bytes, so that one form of copy serves all pairs of tiers.

    Host memory has no shapes: a block is the bytes `[id * b, (id + 1) * b)` of its group there as it is on the
    device. A plain allocation is not touched before a block is moved to it; with a GPU it is pinned, and then it is
    taken at once.

    Args:
        storages: storages of the device, one for each cache group.
        host_bytes: number of bytes of the host tier; 0 for none.
        disk: the tier below that, if there is one.
    """

    def __init__(self, storages: Sequence[Storage], host_bytes: int = 0, disk: DiskBlocks | None = None) -> None:
        device_rows = [storage.data.view(torch.uint8).view(len(storage.data), -1) for storage in storages]
        self._device = device_rows[0].device
        self._disk = disk
        # Held for as long as its rows are: what is pinned ends with this tensor.
        self._memory = pinned_bytes(host_bytes) if self._is_cuda else torch.empty(host_bytes, dtype=torch.uint8)
        self._rows = {
            Tier.DEVICE: device_rows,
            Tier.HOST: [_rows_of(self._memory, rows.shape[1]) for rows in device_rows],
        }
        # Behind the last copies between a GPU and the host that were queued; and whether others were since.
        self._queued: torch.cuda.Event | None = None
        self._has_queued = False

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def apply(self, copies: Sequence[BlockCopy], saves: Sequence[StoredBlock] = (), *, wait: bool = False) -> None:
        """Copy whole blocks, in order: a later copy may read what an earlier one wrote, or take bytes that it gave up.

        On a GPU the copies are queued on the stream that the kernels run on, so that the order holds for kernels too
        and nobody waits. Only a copy within the host, or between it and the disk, is made by the processor itself, once
        the queued ones from and to the host are done: those of earlier steps mostly are. A block of a GPU that goes to
        disk is copied to the host in the order of the queue, and written once it has arrived there.

        Args:
            copies: copies of all groups.
            saves: see `MemoryOps`.
            wait: True to wait for the disk where too many bytes are being written; False to drop the blocks.
        """
        for copy in copies:
            group_idx, src_id, dst_id, src_tier, dst_tier = copy
            if self._is_cuda and Tier.DEVICE not in (src_tier, dst_tier):
                self._wait_for_queued()
            if self._disk is not None and Tier.DISK in (src_tier, dst_tier):
                self._move(self._disk, copy, saves, wait=wait)
                continue
            src, dst = self._rows[src_tier][group_idx], self._rows[dst_tier][group_idx]
            dst[dst_id].copy_(src[src_id], non_blocking=True)
            self._has_queued |= src_tier is not dst_tier
        self._mark_queued()

    def _mark_queued(self) -> None:
        """Note where the copies between a GPU and the host that were queued end."""
        if self._has_queued and self._is_cuda:
            self._queued = self._queued or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._queued.record(torch.cuda.current_stream(self._device))
        self._has_queued = False

    def _wait_for_queued(self) -> None:
        """Wait until the copies between a GPU and the host that were queued are made."""
        self._mark_queued()
        if self._queued is not None:
            self._queued.synchronize()

    def _move(self, disk: DiskBlocks, copy: BlockCopy, saves: Sequence[StoredBlock], *, wait: bool) -> None:
        """Move one block from or to disk."""
        if copy.src_tier is Tier.DISK:
            row = self._rows[copy.dst_tier][copy.group_idx][copy.dst_id]
            row.copy_(placed(disk.take(copy.src_id), row.device))
        else:
            row = self._rows[copy.src_tier][copy.group_idx][copy.src_id]
            disk.save(saves[copy.dst_id], bytes_to_save(row, copy.src_tier), wait=wait)

    def measure_copies(self) -> float | None:
        """Return the bytes that move between the tiers in a second, None without a host tier.

        Blocks are moved to the host and back, so it is for the time before any block is held.
        """
        device, host = self._rows[Tier.DEVICE][0], self._rows[Tier.HOST][0]
        block_bytes = device.shape[1]
        count = min(len(device), len(host), max(1, CALIBRATION_BYTES // block_bytes))
        if not count:
            return None
        away = [BlockCopy(0, block_id, block_id, Tier.DEVICE, Tier.HOST) for block_id in range(count)]
        back = [BlockCopy(0, block_id, block_id, Tier.HOST, Tier.DEVICE) for block_id in range(count)]
        # The first round takes the pages, or wakes the GPU.
        for _ in range(2):
            started = time.perf_counter()
            self.apply(away + back)
            if self._is_cuda:
                torch.cuda.synchronize(self._device)
            elapsed = time.perf_counter() - started
        return 2 * count * block_bytes / max(elapsed, 1e-9)


def bytes_to_save(row: Tensor, tier: Tier) -> Tensor | Callable[[], ArrivingBytes]:
    """Return what saves a block: of a GPU a function that queues a copy; else its row, until the next copy."""
    return partial(HostCopy, row) if tier is Tier.DEVICE and row.is_cuda else row


def _rows_of(memory: Tensor, row_bytes: int) -> Tensor:
    """Return memory as rows, [number of whole rows, row_bytes]."""
    num_rows = len(memory) // row_bytes
    return memory[: num_rows * row_bytes].view(num_rows, row_bytes)
