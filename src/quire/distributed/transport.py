"""Interface of what moves numbers between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


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
