"""Sums between ranks by torch's gloo: between hosts, and where there are no native kernels."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from quire.errors import RankFailed

# Its types leave out what builds without gloo lack.
dist: Any = torch.distributed

# A rank without requests waits for rank 0 as long as that lives: its end is noticed by the closed connection.
IDLE: Final = timedelta(days=365)
# Time that the threads of a group have to end.
END_TIMEOUT_S: Final = 5.0


class GlooTransport:
    """A rank's part of a group over sockets.

    Args:
        store: store through which the ranks find each other.
        rank: number of this rank.
        size: number of ranks.
        timeout_s: time within which a rank that lives must take part in an operation.
        hostname: name or address of this host's interface; None for the one that its name resolves to.
    """

    name = "gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, hostname: str | None = None) -> None:
        self.rank, self.size = rank, size
        self._group = make_group(store, rank, size, timeout_s, hostname)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Transport`; parts are gathered and added in order, as in shared memory, so that bits are equal."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([parts], [x]))
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        if residual is not None:
            total += residual.float()
        return total.to(x.dtype)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See `Transport`."""
        widest = max(widths)
        padded = part.new_zeros(len(part), widest)
        padded[:, : part.shape[1]] = part
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        self._run(lambda: self._group.gather([] if parts is None else [parts], [padded], options))
        if parts is None:
            return None
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], 1)

    def send(self, message: bytes) -> None:
        """See `Transport`."""
        self._broadcast(torch.tensor([len(message)]))
        if message:
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> Tensor:
        """See `Transport`."""
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length, IDLE)
        message = torch.empty(int(length), dtype=torch.uint8)
        if message.numel():
            self._broadcast(message)
        return message

    def _broadcast(self, tensor: Tensor, timeout: timedelta | None = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if timeout is not None:
            options.timeout = timeout
        self._run(lambda: self._group.broadcast([tensor], options))

    def _run(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            # The links know which rank it was, by its closed connection.
            raise RankFailed(-1, f"cannot be reached ({' '.join(str(error).split())[:120]})") from error

    def fail(self, rank: int) -> None:
        """Do nothing: the connections of a process that ends are closed, which ends the waits for it."""

    def close(self) -> None:
        """End the group; see `end_group`."""
        group, self._group = [self._group], None
        end_group(group)


def end_group(group: list[Any]) -> None:
    """Drop a group of processes, alone in a list, and wait until its threads have ended.

    They take the interpreter's lock once more after an operation. One that did so while the interpreter ends would end
    the process with an abort. A thread that still waits for another rank is left behind after some time.
    """
    ending = threading.Thread(target=group.clear, name="quire-gloo-end", daemon=True)
    ending.start()
    ending.join(END_TIMEOUT_S)


def make_group(store: Any, rank: int, size: int, timeout_s: float, hostname: str | None) -> Any:
    """Return a group of processes; see `GlooTransport`."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    device = {} if hostname is None else {"hostname": hostname}
    options._devices = [dist.ProcessGroupGloo.create_device(**device) if device else _default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _default_device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()
