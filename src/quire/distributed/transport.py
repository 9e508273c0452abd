"""Interfaces of transports and links between ranks, and helpers of transports that use torch's process groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from quire.errors import RankFailed

# An idle rank waits for rank 0 without a time limit; it notices the end of rank 0 by the closed connection.
IDLE: Final = timedelta(days=365)


class Transport(Protocol):
    """Collective operations: all ranks of a group call them in the same order.

    Each raises `RankFailed` if a rank has ended, or does not answer in time.

    Attributes:
        rank, size: number of this rank in the group, and number of the group's ranks.
        name: name of the transport, for logs.
    """

    rank: int
    size: int
    name: str

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of `x` of all ranks and `residual`, added in rank order in float32 and rounded once.

        Every rank gets the same bits.

        Args:
            x: contiguous; may be overwritten.
            residual: tensor of the same shape and dtype, contiguous, with the same bits on all ranks.
        """

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return the columns of all ranks side by side, [R, sum of widths], on rank 0; None on the others.

        Args:
            part: columns of this rank, [R, widths[rank]], contiguous.
            widths: number of columns of each rank.
        """

    def send(self, message: bytes) -> None:
        """Send bytes from rank 0 to all others."""

    def receive(self) -> Tensor:
        """Return the next message of rank 0, uint8 [N]; without a time limit while rank 0 is alive."""

    def fail(self, rank: int) -> None:
        """End the waits of this rank, and if possible of all others, because a rank of the model has failed."""

    def close(self) -> None:
        """Release the resources of the transport."""


class StageLink(Protocol):
    """One end of the link between two stages; its operations fail like operations of a `Transport`."""

    def send(self, x: Tensor) -> None:
        """Send a contiguous tensor, without waiting for the receiver of the previous one."""

    def receive(self, x: Tensor) -> None:
        """Fill a contiguous tensor with the next tensor that the other end sends."""

    def fail(self, rank: int) -> None:
        """End the waits here because a rank has failed."""

    def close(self) -> None:
        """Release the resources of the link."""


class DeviceTransport(ABC):
    """A `Transport` of tensors on a device; it passes messages and tensors in host memory to the transport `host`."""

    def __init__(self, host: Transport, device: torch.device, name: str) -> None:
        self.rank, self.size, self.name = host.rank, host.size, name
        self.device, self.num_started = device, 0
        self._host = host

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Transport`."""
        return self._host.all_reduce(x, residual)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See `Transport`."""
        return self._host.gather(part, widths)

    @abstractmethod
    def broadcast(self, x: Tensor) -> None:
        """Overwrite `x` with rank 0's `x`; it is contiguous and has the same shape and dtype on all ranks."""

    def send(self, message: Any) -> None:
        """See `Transport`."""
        self._host.send(message)

    def receive(self) -> Tensor:
        """See `Transport`."""
        return self._host.receive()

    def fail(self, rank: int) -> None:
        """See `Transport`."""
        self._host.fail(rank)

    def close(self) -> None:
        """See `Transport`."""
        self._host.close()


def is_loopback(address: str) -> bool:
    """Return whether an IP address is reached from its own host only."""
    return ip_address(address.partition("%")[0]).is_loopback


@contextmanager
def reaching(rank: int | None = None) -> Iterator[None]:
    """Raise `RankFailed` for an error of torch; None is an unknown rank, but the links notice which rank has ended."""
    try:
        yield
    except RuntimeError as error:
        raise RankFailed(rank, f"cannot be reached ({' '.join(str(error).split())[:120]})") from error


def sum_in_order(parts: Sequence[Tensor] | Tensor, residual: Tensor | None) -> Tensor:
    """Return the sum of `parts` and `residual`, added in rank order in float32 and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    if residual is not None:
        total += residual
    return total.to(parts[0].dtype)


def gather_columns(
    part: Tensor, widths: Sequence[int], is_root: bool, gather: Callable[[list[list[Tensor]], list[Tensor]], None]
) -> Tensor | None:
    """Gather columns with padding, since torch gathers parts of equal shape; see `Transport.gather`."""
    padded = part
    if part.shape[1] < max(widths):
        padded = part.new_zeros(len(part), max(widths))
        padded[:, : part.shape[1]] = part
    parts = [torch.empty_like(padded) for _ in widths] if is_root else None
    gather([] if parts is None else [parts], [padded])
    if parts is None:
        return None
    return torch.cat([columns[:, :width] for columns, width in zip(parts, widths, strict=True)], 1)
