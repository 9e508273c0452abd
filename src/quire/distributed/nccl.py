"""Sums between ranks on GPUs by torch's NCCL; messages of rank 0 use a transport between hosts."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d

from quire.distributed.transport import IDLE, DeviceTransport, Transport, gather_columns, reaching, sum_in_order
from quire.errors import RankFailed

# Untyped: torch's types lack the names that builds without NCCL lack.
dist: Any = torch.distributed
c10d: Any = distributed_c10d

logger = logging.getLogger(__name__)

# Tensors up to this size are gathered whole by all ranks, in one operation; each rank sums a slice of larger ones.
WHOLE_BYTES: Final = 1 << 18
# Time that the end of a communicator may take before this process goes on without it.
ABORT_TIMEOUT_S: Final = 10.0


class NcclTransport(DeviceTransport):
    """A rank's part of a group of GPUs.

    Sums have the same bits as in `GlooTransport`: NCCL moves the parts, which are added here, in rank order and in
    float32. All operations are queued on the current stream and none waits for the device, so they can be captured.
    """

    def __init__(self, group: Any, host: Transport, device: torch.device) -> None:
        super().__init__(host, device, "NCCL")
        self._group = group
        self._failure: RankFailed | None = None
        self._lock = threading.Lock()
        self._abort: threading.Thread | None = None

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Transport`."""
        if x.device.type != self.device.type:
            return self._host.all_reduce(x, residual)
        if not x.numel():
            return x if residual is None else residual
        if self.size == 2 or x.nbytes <= WHOLE_BYTES:
            parts = self._gather_whole(x.view(-1)).view(self.size, *x.shape)
            return sum_in_order(parts, residual)
        return self._sum_slices(x, residual)

    def _gather_whole(self, x: Tensor) -> Tensor:
        """Return `x` [N] of all ranks in rank order, [ranks * N]."""
        parts = x.new_empty(self.size * x.numel())
        self._run(lambda: self._group._allgather_base(parts, x, _options(c10d.AllgatherOptions)))
        return parts

    def _sum_slices(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the sum: each rank sums a slice, then slices are gathered; as few bytes are moved as in a ring."""
        length = -(-x.numel() // self.size)
        mine = slice(self.rank * length, (self.rank + 1) * length)
        padded = _padded(x.view(-1), self.size * length)
        parts = torch.empty_like(padded)
        self._run(lambda: self._group.alltoall_base(parts, padded, [], [], _options(c10d.AllToAllOptions)))
        added = None if residual is None else _padded(residual.view(-1)[mine], length)
        total = self._gather_whole(sum_in_order(parts.view(self.size, length), added))
        return total[: x.numel()].view(x.shape)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See `Transport`."""
        if part.device.type != self.device.type:
            return self._host.gather(part, widths)
        if not len(part):
            return part.new_empty(0, sum(widths)) if self.rank == 0 else None
        options = _options(c10d.GatherOptions)
        options.rootRank = 0

        def gather(parts: list[list[Tensor]], mine: list[Tensor]) -> None:
            self._run(lambda: self._group.gather(parts, mine, options))

        return gather_columns(part, widths, self.rank == 0, gather)

    def broadcast(self, x: Tensor) -> None:
        """See `DeviceTransport`."""
        if x.numel():
            options = _options(c10d.BroadcastOptions)
            options.rootRank = 0
            self._run(lambda: self._group.broadcast([x], options))

    def _run(self, start: Callable[[], Any]) -> None:
        """Start an operation."""
        self._check()
        self.num_started += 1
        try:
            with reaching():
                work = start()
                if work is not None:  # the operation is not queued on the current stream
                    work.wait()
        except RankFailed:
            self._check()
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def fail(self, rank: int) -> None:
        """See `Transport`: aborts kernels that wait for other ranks, and so ends the waits of hosts for them."""
        with self._lock:
            self._failure = self._failure or RankFailed(rank, "has ended")
        self._host.fail(rank)
        self._end()

    def close(self) -> None:
        """End the communicator."""
        self._end().join(ABORT_TIMEOUT_S)
        self._host.close()

    def _end(self) -> threading.Thread:
        """End the communicator, in a thread that is started once: this may take long, and the caller continues."""
        with self._lock:
            if self._abort is None:
                self._abort = threading.Thread(target=self._abort_group, name="quire-nccl-abort", daemon=True)
                self._abort.start()
            return self._abort

    def _abort_group(self) -> None:
        try:
            self._group.abort()
        except RuntimeError as error:
            logger.warning("the communicator of rank %d did not end: %s", self.rank, error)


def _padded(x: Tensor, length: int) -> Tensor:
    """Return `x` [N] padded with zeros, [length]."""
    return x if len(x) == length else torch.nn.functional.pad(x, (0, length - len(x)))


def _options(kind: Any) -> Any:
    """Return options of an operation that is queued on the current stream, not on a stream of NCCL."""
    options = kind()
    options.asyncOp = False
    return options


@contextmanager
def _unwatched() -> Iterator[None]:
    """Make process groups without torch's watchdog, which ends the whole process if a rank does not answer.

    Here requests must end with an error, and the program continues: `DeviceRankGroup` and the links watch ranks.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def connect_nccl(store: Any, host: Transport, device: torch.device) -> NcclTransport:
    """Return the transport of a rank, once all ranks have called this."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = IDLE
    try:
        with _unwatched():
            group = dist.ProcessGroupNCCL(store, host.rank, host.size, options)
        group.eager_connect_single_device(device)
    except RuntimeError as error:
        raise RankFailed(host.rank, f"is not connected by NCCL: {' '.join(str(error).split())[:300]}") from error
    return NcclTransport(group, host, device)
