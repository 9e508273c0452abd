"""A group of ranks whose tensors are on devices: only the commands of rank 0 go through host memory."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.distributed.transport import DeviceTransport, Transport
from quire.errors import RankFailed

# Number of checks of a wait for a device, over the time that it may take.
LOOKS: Final = 20
SIZE_BYTES: Final = 8


class StagedTransport(DeviceTransport):
    """A transport that copies tensors to the host, sums them there and copies them back: used without NCCL."""

    def __init__(self, host: Transport, device: torch.device) -> None:
        super().__init__(host, device, f"{host.name}, through host memory")

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Transport`."""
        return self._host.all_reduce(self._staged(x), None if residual is None else self._staged(residual)).to(x.device)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See `Transport`."""
        whole = self._host.gather(self._staged(part), widths)
        return None if whole is None else whole.to(part.device)

    def broadcast(self, x: Tensor) -> None:
        """See `DeviceTransport`."""
        if x.numel():
            staged = self._staged(x)
            # A sum with zeros: between hosts, messages are bytes and no tensors.
            x.copy_(self._host.all_reduce(staged if self.rank == 0 else torch.zeros_like(staged)))

    def _staged(self, x: Tensor) -> Tensor:
        """Return a tensor in the host's memory."""
        self.num_started += 1
        return x.cpu()


class DeviceRankGroup(RankGroup):
    """The ranks of a model on devices.

    Rows for the output head go from device to device, after a message with their number.
    """

    def __init__(self, transport: DeviceTransport, timeout_s: float, *, divides_experts: bool = False) -> None:
        super().__init__(transport, divides_experts=divides_experts)
        self._devices, self._timeout_s = transport, timeout_s
        self.on_timeout: Callable[[RankFailed], None] = lambda _: self.fail(self.rank)
        self._round: object | None = None
        self._seen: tuple[object | None, int] = None, 0
        self._since = time.monotonic()
        self._is_watched = False

    def _send_rows(self, kind: int, rows: Tensor) -> None:
        """See `RankGroup`."""
        self._send(kind, len(rows).to_bytes(SIZE_BYTES, "little"))
        self._devices.broadcast(rows)

    def _rows_of(self, message: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """See `RankGroup`."""
        count = int.from_bytes(bytes(message[-SIZE_BYTES:].tolist()), "little")
        rows = torch.empty(count, width, dtype=dtype, device=self._devices.device)
        self._devices.broadcast(rows)
        return rows

    def of_first(self, numbers: Tensor) -> Tensor:
        """See `RankGroup`: from device to device, and no sum."""
        if numbers.device.type != self._devices.device.type:
            return super().of_first(numbers)
        copied = numbers.float()
        self._devices.broadcast(copied)
        return copied.long()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See `RankGroup`: a host that waits for its device cannot notice that another rank has failed.

        Other ranks than 0 need no watch: they wait for rank 0 only, and notice its end.
        """
        if self.rank:
            yield
            return
        if not self._is_watched:
            self._is_watched = True
            interval_s = self._timeout_s / LOOKS
            watch = threading.Thread(target=_watch, args=(weakref.ref(self), interval_s), name="quire-device-watch")
            watch.daemon = True
            watch.start()
        self._round = object()
        try:
            yield
        finally:
            self._round = None

    def look(self) -> bool:
        """Report a silent rank if a round has started no operation for `timeout_s`; return False then, else True."""
        now = self._round, self._devices.num_started
        if now[0] is None or now != self._seen:
            self._seen, self._since = now, time.monotonic()
        elif time.monotonic() - self._since >= self._timeout_s:
            self.on_timeout(silent_rank(self.size, self._timeout_s))
            return False
        return True


def _watch(group: weakref.ref[DeviceRankGroup], interval_s: float) -> None:
    """Call `look` of a group at intervals, until it returns False or the group is deleted."""
    while True:
        time.sleep(interval_s)
        watched = group()
        if watched is None or not watched.look():
            return
        del watched


def silent_rank(size: int, timeout_s: float) -> RankFailed:
    """Return the error of a rank that does not answer; None if it can be one of several, as devices do not tell."""
    return RankFailed(1 if size == 2 else None, f"did not answer within {timeout_s:g} s")
