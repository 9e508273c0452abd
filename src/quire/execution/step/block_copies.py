"""Blocks in host memory, and copies of blocks within and between the tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.distributed.kvstore.record import ArrivingBytes
from quire.execution.step.kv_storage import Storage
from quire.execution.step.pinned import HostCopy, pinned_bytes, placed
from quire.memory.results import BlockCopy, StoredBlock, Tier

# Large enough that CPU caches do not inflate the measured rate, small enough that it does not delay loading.
CALIBRATION_BYTES = 32 << 20


class BlockCopier:
    """Copies blocks; a block of any tier is a row of bytes, so that one kind of copy serves all pairs of tiers.

    Host memory has no shapes: as on the device, a block is the bytes `[id * b, (id + 1) * b)` of its group. Pageable
    memory becomes resident when a block is copied to it; with a GPU the memory is pinned, and so resident at once.
    """

    def __init__(self, storages: Sequence[Storage], host_bytes: int = 0, disk: DiskBlocks | None = None) -> None:
        device_rows = [storage.data.view(torch.uint8).view(len(storage.data), -1) for storage in storages]
        self._device = device_rows[0].device
        self._disk = disk
        # Must live as long as its rows: the memory is unpinned when this tensor is freed.
        self._memory = pinned_bytes(host_bytes) if self._is_cuda else torch.empty(host_bytes, dtype=torch.uint8)
        self._rows = {
            Tier.DEVICE: device_rows,
            Tier.HOST: [_rows_of(self._memory, rows.shape[1]) for rows in device_rows],
        }
        # Event after the last queued copies between a GPU and the host; and whether more have been queued since.
        self._queued: torch.cuda.Event | None = None
        self._has_queued = False

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def apply(self, copies: Sequence[BlockCopy], saves: Sequence[StoredBlock] = (), *, wait: bool = False) -> None:
        """Copy whole blocks, in order: a later copy may read or overwrite blocks that an earlier one wrote or read.

        On a GPU the copies are queued on the stream of the kernels, so that they are ordered with kernels too, and the
        host does not wait. Only a copy within the host, or between host and disk, is made by the CPU, after the queued
        copies from and to the host are done: copies of earlier steps usually are. A GPU block that goes to disk is
        copied to the host on the stream, and written to disk once that copy is done.
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
        """Record an event after the queued copies between a GPU and the host."""
        if self._has_queued and self._is_cuda:
            self._queued = self._queued or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._queued.record(torch.cuda.current_stream(self._device))
        self._has_queued = False

    def _wait_for_queued(self) -> None:
        """Wait for the queued copies between a GPU and the host."""
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
        """Return the bandwidth between device and host tier in bytes per second; None without a host tier.

        Blocks are copied to the host and back, which overwrites them: call it before any block is in use.
        """
        device, host = self._rows[Tier.DEVICE][0], self._rows[Tier.HOST][0]
        block_bytes = device.shape[1]
        count = min(len(device), len(host), max(1, CALIBRATION_BYTES // block_bytes))
        if not count:
            return None
        away = [BlockCopy(0, block_id, block_id, Tier.DEVICE, Tier.HOST) for block_id in range(count)]
        back = [BlockCopy(0, block_id, block_id, Tier.HOST, Tier.DEVICE) for block_id in range(count)]
        # The first round faults pages in, or wakes the GPU up.
        for _ in range(2):
            started = time.perf_counter()
            self.apply(away + back)
            if self._is_cuda:
                torch.cuda.synchronize(self._device)
            elapsed = time.perf_counter() - started
        return 2 * count * block_bytes / max(elapsed, 1e-9)


def bytes_to_save(row: Tensor, tier: Tier) -> Tensor | Callable[[], ArrivingBytes]:
    """Return the source to save a block from: on a GPU a function that queues a copy, else the row itself."""
    return partial(HostCopy, row) if tier is Tier.DEVICE and row.is_cuda else row


def _rows_of(memory: Tensor, row_bytes: int) -> Tensor:
    """Return memory as rows, [number of whole rows, row_bytes]."""
    num_rows = len(memory) // row_bytes
    return memory[: num_rows * row_bytes].view(num_rows, row_bytes)
