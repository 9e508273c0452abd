"""A group of ranks, for the model and the engine: sums, logits, and the commands of rank 0."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.distributed.transport import Transport

# Kinds of messages of rank 0. The header's size is a multiple of every dtype's size, so the content is aligned.
COMMANDS, ROWS, LIKELIEST = 0, 1, 2
HEADER_BYTES: Final = 8
_HEADERS: Final = tuple(kind.to_bytes(HEADER_BYTES, "little") for kind in (COMMANDS, ROWS, LIKELIEST))


class RankGroup:
    """The ranks of a model.

    Args:
        transport: operations between them.
        divides_experts: True if each rank has whole experts (expert parallel), not columns of each expert.

    Attributes:
        rank, size: number of this rank, and number of ranks.
        divides_experts: the argument.
        runs_ahead: True if this rank executes plans as soon as they are made, not in lockstep with rank 0.
    """

    runs_ahead = False

    def __init__(self, transport: Transport, *, divides_experts: bool = False) -> None:
        self.transport, self.divides_experts = transport, divides_experts
        self.rank, self.size = transport.rank, transport.size
        self._commands: bytes | None = None

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of `x` over the ranks, and of `residual`; see `Transport`. `x` may be overwritten."""
        return self.transport.all_reduce(x.contiguous(), None if residual is None else residual.contiguous())

    def is_true_of_all(self, value: bool) -> bool:
        """Return whether `value` is True on every rank; all ranks call it."""
        return bool(self.all_reduce(torch.tensor([float(value)]))[0] == self.size)

    def fail(self, rank: int) -> None:
        """End the waits of this rank because a rank has failed; see `Transport`."""
        self.transport.fail(rank)

    def close(self) -> None:
        """Release the resources of the group, which cannot be used any more."""
        self.transport.close()

    # ---- the output head, whose columns are divided ----

    def head(self, hidden: Tensor, product: Callable[[Tensor], Tensor], widths: Sequence[int]) -> Tensor:
        """Return the product [R, sum of widths] of hidden states [R, E]; each rank computes its columns.

        It is called on rank 0, while the others are in `serve_head`: they get the rows, so need not know their indices.

        Args:
            hidden: the rows.
            product: function that returns this rank's columns.
            widths: number of columns of each rank.
        """
        assert self.rank == 0, "rank 0 alone has whole logits"
        rows = hidden.contiguous()
        self._send_rows(ROWS, rows)
        whole = self.transport.gather(product(rows).contiguous(), widths)
        assert whole is not None
        return whole

    def likeliest(
        self, hidden: Tensor, logits: Callable[[Tensor], Tensor], widths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the greatest logit of each row of hidden states [R, E], and its column: float32 [R] and int64 [R].

        As `head`, but each rank finds the maximum of its own columns. The first of equal logits is taken.

        Args:
            hidden: rows.
            logits: function that returns the logits of this rank's columns, float32.
            widths: number of columns of each rank.
        """
        assert self.rank == 0, "rank 0 alone draws tokens"
        rows = hidden.contiguous()
        self._send_rows(LIKELIEST, rows)
        pairs = self._gather_likeliest(logits(rows), widths)
        assert pairs is not None
        best, rank = pairs[:, ::2].max(-1)
        columns = pairs[:, 1::2].view(torch.int32).gather(1, rank[:, None])[:, 0]
        return best, columns.long()

    def _gather_likeliest(self, logits: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return each rank's greatest logit and its column (int32 bits), [R, 2 * size] on rank 0, None on others."""
        values, columns = logits.max(-1)
        columns += sum(widths[: self.rank])
        pairs = torch.stack((values, columns.int().view(torch.float32)), 1)
        return self.transport.gather(pairs, [2] * self.size)

    def agreed_likeliest(self, logits: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the column of the greatest logit of each row, int64 [R]; the first of equal logits.

        The result is the same on every rank; all ranks call it.

        Args:
            logits: logits of this rank's columns, float32 [R, widths[rank]].
            widths: number of columns of each rank.
        """
        values, columns = logits.max(-1)
        maxima = logits.new_zeros(2, len(logits), self.size)
        # float32 represents column numbers below 2^24 exactly, also after the sum with zeros.
        maxima[0, :, self.rank], maxima[1, :, self.rank] = values, (columns + sum(widths[: self.rank])).float()
        maxima = self.all_reduce(maxima)
        return maxima[1].gather(1, maxima[0].argmax(-1, keepdim=True))[:, 0].long()

    def of_first(self, numbers: Tensor) -> Tensor:
        """Return rank 0's integers [R], of at most 24 bits, on every rank; all ranks call it with the same R."""
        mine = numbers.float() if self.rank == 0 else numbers.new_zeros(numbers.shape, dtype=torch.float32)
        return self.all_reduce(mine).long()

    def serve_head(
        self,
        width: int,
        dtype: torch.dtype,
        product: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        widths: Sequence[int],
    ) -> None:
        """Compute this rank's columns for rows from rank 0, until rank 0 sends commands; see `head`, `likeliest`."""
        while True:
            message = self.transport.receive()
            if message[0] == COMMANDS:
                self._commands = _content(message)
                return
            rows = self._rows_of(message, dtype, width)
            if message[0] == ROWS:
                self.transport.gather(product(rows).contiguous(), widths)
            else:
                self._gather_likeliest(logits(rows), widths)

    def _send_rows(self, kind: int, rows: Tensor) -> None:
        """Send contiguous rows from rank 0 to all others."""
        self._send(kind, _bytes_of(rows))

    def _rows_of(self, message: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """Return the rows [R, width] of a message of `_send_rows`."""
        return message[HEADER_BYTES:].view(dtype).view(-1, width)

    def end_round(self) -> None:
        """End a step without following commands, such as a measured one: other ranks leave `serve_head`."""
        if self.rank == 0:
            self.send_commands(b"")
        else:
            self.receive_commands()

    def watched(self) -> AbstractContextManager[None]:
        """Return a context in which a host waits for results of ranks; rank 0 fails the group if a rank is silent.

        Only groups on devices need it: operations of transports between hosts have their own time limit.
        """
        return nullcontext()

    # ---- commands ----

    def send_commands(self, commands: bytes) -> None:
        """Send commands from rank 0 to all others."""
        self._send(COMMANDS, commands)

    def receive_commands(self) -> bytes:
        """Return the next commands of rank 0."""
        if self._commands is not None:
            commands, self._commands = self._commands, None
            return commands
        message = self.transport.receive()
        assert message[0] == COMMANDS, "rows come only while the others serve the head"
        return _content(message)

    def _send(self, kind: int, content: bytes | ctypes.Array[ctypes.c_ubyte]) -> None:
        # As bytes: making a tensor would take longer than everything else for a short message.
        self.transport.send(_HEADERS[kind] + content)


def _bytes_of(tensor: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Return a view of a contiguous tensor's memory; the tensor must outlive it."""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())


def _content(message: Tensor) -> bytes:
    return ctypes.string_at(message.data_ptr() + HEADER_BYTES, message.numel() - HEADER_BYTES)
