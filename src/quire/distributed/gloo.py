"""Sums and links between ranks by torch's gloo: between hosts, or without native kernels."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from quire.config import ParallelConfig
from quire.distributed.pipeline import PipelineGroup, RankGrid, connect_stages
from quire.distributed.transport import IDLE, Transport, gather_columns, is_loopback, reaching, sum_in_order
from quire.errors import ConfigError, shown

# Untyped: torch's types lack the names that builds without gloo lack.
dist: Any = torch.distributed

# Time that the threads of a group have to end.
END_TIMEOUT_S: Final = 5.0
# torch's environment variable for the interfaces of gloo's sockets.
INTERFACES: Final = "GLOO_SOCKET_IFNAME"


class GlooTransport:
    """A rank's part of a group over sockets.

    Args:
        store: store through which the ranks find each other.
        rank: number of this rank.
        size: number of ranks.
        timeout_s: time within which every rank must take part in an operation.
        hostname: address of this host's interface; see `make_group`.
        members: numbers of the group's ranks among all of the model; None if they are the same.
    """

    name = "gloo"

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        hostname: str,
        members: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        members = members or range(size)
        # The rank that an operation fails to reach: known in a group of two, and where rank 0 sends.
        self._root, self._peer = members[0], members[1 - rank] if size == 2 else None
        self._group = make_group(store, rank, size, timeout_s, hostname)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Transport`; parts are gathered and added in rank order, so the bits are the same as in shared memory."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with reaching(self._peer):
            self._group.allgather([parts], [x]).wait()
        return sum_in_order(parts, residual)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See `Transport`."""
        options = dist.GatherOptions()
        options.rootRank = 0

        def gather(parts: list[list[Tensor]], mine: list[Tensor]) -> None:
            with reaching(self._peer if self.rank == 0 else self._root):
                self._group.gather(parts, mine, options).wait()

        return gather_columns(part, widths, self.rank == 0, gather)

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
        with reaching(self._peer if self.rank == 0 else self._root):
            self._group.broadcast([tensor], options).wait()

    def fail(self, rank: int) -> None:
        """Do nothing: the connections of a process that ends are closed, which ends the waits for it."""

    def close(self) -> None:
        """End the group; see `end_group`."""
        group, self._group = [self._group], None
        end_group(group)


class GlooLink:
    """One end of a link over sockets."""

    def __init__(self, group: Any, peer: int, timeout_s: float) -> None:
        self._group, self._peer, self._timeout = group, peer, timedelta(seconds=timeout_s)
        self._turn = 0
        # Sends in progress, and their tensors, which must stay alive: the receiver may be busy with earlier messages.
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, x: Tensor) -> None:
        """See `StageLink`."""
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        with reaching(self._peer):
            self._sent.append((self._group.send([x], self._peer, self._turn), x))
        self._turn += 1

    def receive(self, x: Tensor) -> None:
        """See `StageLink`."""
        with reaching(self._peer):
            self._group.recv([x], self._peer, self._turn).wait(self._timeout)
        self._turn += 1

    def fail(self, rank: int) -> None:
        """Do nothing: the connections of a process that ends are closed, which ends the waits for it."""

    def close(self) -> None:
        """Drop this link's group of processes, which both links of the rank share; see `end_group`."""
        group, self._group = [self._group], None
        self._sent.clear()
        end_group(group)


def end_group(group: list[Any]) -> None:
    """Drop a group of processes, alone in a list, and wait until its threads have ended.

    They take the interpreter's lock once more after an operation; doing so while the interpreter ends would abort the
    process. This waits at most `END_TIMEOUT_S`, since a thread may still wait for another rank.
    """
    ending = threading.Thread(target=group.clear, name="quire-gloo-end", daemon=True)
    ending.start()
    ending.join(END_TIMEOUT_S)


def socket_interfaces() -> list[str]:
    """Return the interfaces that `GLOO_SOCKET_IFNAME` names for connections between hosts; none without it.

    Raises:
        ConfigError: this host has no such interface, or it has no address.
    """
    names = [name.strip() for name in os.environ.get(INTERFACES, "").split(",") if name.strip()]
    existing = [name for _, name in socket.if_nameindex()]
    for name in names:
        reason = None if name in existing else "does not exist"
        if reason is None:
            try:
                dist.ProcessGroupGloo.create_device(interface=name)
            except RuntimeError:
                reason = "has no address"
        if reason is not None:
            raise ConfigError(
                f"the environment variable {INTERFACES} must name interfaces of this host with an address "
                f"({', '.join(existing)}), got {shown(name)}, which {reason}"
            )
    return names


def make_group(store: Any, rank: int, size: int, timeout_s: float, hostname: str) -> Any:
    """Return a group of processes; see `GlooTransport`.

    Its sockets listen at the address `hostname`, or, between hosts, at the interfaces of `socket_interfaces`. A host's
    own name is not used: on many systems it is a name of a loopback address, which other hosts cannot reach.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    kind = dist.ProcessGroupGloo
    interfaces = [] if is_loopback(hostname) else socket_interfaces()
    devices = [kind.create_device(interface=name) for name in interfaces]
    options._devices = devices or [kind.create_device(hostname=hostname)]
    with reaching():
        return kind(store, rank, size, options)


def connect_by_gloo(
    store: Any, rank: int, config: ParallelConfig, hostname: str, sums: Transport | None = None
) -> PipelineGroup:
    """Return the group of a rank whose parts are connected by sockets."""
    grid, timeout_s = RankGrid.of(config), config.distributed_timeout_s
    stage, tensor_rank = grid.stage_of(rank), grid.tensor_rank_of(rank)

    @cache
    def stages() -> Any:
        return make_group(dist.PrefixStore("stages", store), rank, grid.size, timeout_s, hostname)

    def join(name: str, members: Sequence[int]) -> Transport:
        part = dist.PrefixStore(name, store)
        return GlooTransport(part, members.index(rank), len(members), timeout_s, hostname, members)

    def link(first_stage: int) -> GlooLink:
        other_stage = first_stage + (first_stage == stage)
        return GlooLink(stages(), grid.rank_of(other_stage, tensor_rank), timeout_s)

    return connect_stages(rank, config, join, link, sums)
