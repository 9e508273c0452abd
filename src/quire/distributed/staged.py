"""Sums between ranks on devices through the hosts' memory: the slow twin of NCCL, and where torch has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.distributed.transport import Transport


class StagedTransport:
    """A rank's part of a group whose tensors are copied to the host, summed there, and copied back."""

    def __init__(self, host: Transport, device: torch.device) -> None:
        self.rank, self.size = host.rank, host.size
        self.device, self.num_started = device, 0
        self.name = f"{host.name}, through host memory"
        self._host = host

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
