"""Interfaces of what moves numbers between ranks, and what transports by process groups of torch share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from quire.errors import RankFailed

# A rank without requests waits for rank 0 as long as that lives: its end is noticed by the closed connection.
IDLE: Final = timedelta(days=365)


class Transport(Protocol):
    """Operations in which all ranks take part, in the same order.

    Each raises `RankFailed` where a rank has ended, or does not answer in time.

    Attributes:
        rank, size: number of this rank in the group, and of the group's ranks.
        name: name of the transport, for logs.
    """

    rank: int
    size: int
    name: str

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of `x` over the ranks, in their order and in float32, and of `residual`, rounded once.

        Every rank gets the same bits.

        Args:
            x: contiguous; may be overwritten.
            residual: tensor of the same shape and dtype, contiguous, with the same bits on all ranks.
        """

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return the columns of all ranks side by side, [R, sum of widths], on rank 0; None on the others.

        Args:
            part: [R, widths[rank]], contiguous.
            widths: number of columns of each rank.
        """

    def send(self, message: bytes) -> None:
        """Send bytes from rank 0 to all others."""

    def receive(self) -> Tensor:
        """Return the next message of rank 0, uint8 [N], for which there is no time limit while that lives."""

    def fail(self, rank: int) -> None:
        """End the waits of this rank, and where possible of all others, because a rank of the model has failed."""

    def close(self) -> None:
        """Let go of what the transport holds."""


class StageLink(Protocol):
    """One end of the link between two stages; its operations fail as those of a `Transport`."""

    def send(self, x: Tensor) -> None:
        """Send a contiguous tensor; the receiver of the one before may not have taken it yet."""

    def receive(self, x: Tensor) -> None:
        """Fill a contiguous tensor with what the other end sends next."""

    def fail(self, rank: int) -> None:
        """End the waits here because a rank has failed."""

    def close(self) -> None:
        """Let go of what the link holds."""


class DeviceTransport:
    """A `Transport` of tensors on a device, whose messages, and tensors in a host's memory, go by one of hosts."""

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

    def broadcast(self, x: Tensor) -> None:
        """Fill `x`, contiguous and of one shape and dtype on all ranks, with what it is on rank 0."""
        raise NotImplementedError

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


@contextmanager
def reaching(rank: int = -1) -> Iterator[None]:
    """Raise `RankFailed` for an error of torch: the links know which rank it was, by its closed connection."""
    try:
        yield
    except RuntimeError as error:
        raise RankFailed(rank, f"cannot be reached ({' '.join(str(error).split())[:120]})") from error


def sum_in_order(parts: Sequence[Tensor] | Tensor, residual: Tensor | None) -> Tensor:
    """Return the sum of `parts` in the order of the ranks and in float32, and of `residual`, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    if residual is not None:
        total += residual
    return total.to(parts[0].dtype)


def gather_columns(
    part: Tensor, widths: Sequence[int], is_root: bool, gather: Callable[[list[list[Tensor]], list[Tensor]], None]
) -> Tensor | None:
    """Return the columns of all ranks, which torch gathers with one width; see `Transport.gather`."""
    padded = part
    if part.shape[1] < max(widths):
        padded = part.new_zeros(len(part), max(widths))
        padded[:, : part.shape[1]] = part
    parts = [torch.empty_like(padded) for _ in widths] if is_root else None
    gather([] if parts is None else [parts], [padded])
    if parts is None:
        return None
    return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], 1)
