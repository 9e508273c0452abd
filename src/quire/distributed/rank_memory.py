"""The memory of a rank, and the least of several ranks: a pool of blocks must fit into that of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.config import Machine, StepCost


class RankMemory(NamedTuple):
    """Memory of a rank after its part of the weights is loaded, in bytes.

    Args:
        available: memory that can still be allocated: of its GPU, or on a CPU its share of the host's.
        total: total memory of its GPU; None on a CPU.
        host: its share of the host's memory that can still be allocated; None on a CPU.
        fixed, per_token: memory of a step; see `StepCost`.
    """

    available: int
    total: int | None
    host: int | None
    fixed: int
    per_token: int

    @classmethod
    def of(cls, machine: Machine, step: StepCost, num_local: int) -> RankMemory:
        """Return the memory of one of some ranks on a host, each with a GPU of its own or all with the CPU."""
        host = None if machine.host_bytes is None else machine.host_bytes // num_local
        available = machine.available_bytes // (num_local if machine.total_bytes is None else 1)
        return cls(available, machine.total_bytes, host, step.fixed_bytes, step.bytes_per_token)

    def least(self, others: Sequence[RankMemory]) -> RankMemory:
        """Return a memory for all: no rank has less for its cache, whatever share of a GPU may be taken."""
        ranks = (self, *others)
        totals = [rank.total for rank in ranks if rank.total is not None]
        available, total = min(rank.available for rank in ranks), None
        if totals:
            # A cache is a share of the total without the bytes that are taken, so each of the two has its own extreme.
            total = min(totals)
            available = max(0, total - max(rank.total - rank.available for rank in ranks if rank.total is not None))
        hosts = [rank.host for rank in ranks if rank.host is not None]
        return RankMemory(
            available,
            total,
            min(hosts, default=None),
            max(rank.fixed for rank in ranks),
            max(rank.per_token for rank in ranks),
        )

    def machine(self, probed: Machine, num_threads: int) -> Machine:
        """Return the machine of a rank that has this memory."""
        return replace(
            probed,
            available_bytes=self.available,
            total_bytes=self.total,
            host_bytes=self.host,
            num_threads=num_threads,
        )

    @property
    def step(self) -> StepCost:
        """Memory of a step."""
        return StepCost(fixed_bytes=self.fixed, bytes_per_token=self.per_token)
