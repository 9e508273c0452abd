"""The processor cores of the ranks of a host."""

from __future__ import annotations

from typing import NamedTuple

from quire.config.cpu_bind import NONE, cpu_lists
from quire.errors import ConfigError
from quire.platform.numa import allowed_cpus, nodes_of, share_cores


class CpuSets(NamedTuple):
    """Hardware threads of each rank of this host; empty if ranks are not bound.

    Args:
        shares: hardware threads by the rank's number on this host.
        is_chosen: True if the user has listed them (`cpu_bind`).
        num_nodes: number of NUMA nodes.
    """

    shares: tuple[tuple[int, ...], ...]
    is_chosen: bool = False
    num_nodes: int = 1

    @classmethod
    def of(cls, option: str, num_local: int) -> CpuSets:
        """Return the sets for the option `cpu_bind` on this host."""
        lists, allowed = cpu_lists(option), allowed_cpus()
        if lists is None:
            nodes = nodes_of(allowed) if allowed and option != NONE else []
            return cls(tuple(share_cores(nodes, num_local)) if nodes else ((),) * num_local, num_nodes=len(nodes))
        if len(lists) != num_local:
            raise ConfigError(
                f"cpu_bind must have a list of cores for each of the {num_local} ranks on this host, got {len(lists)}",
                field="cpu_bind",
            )
        foreign = sorted({cpu for cpus in lists for cpu in cpus} - {*allowed})
        if foreign:
            raise ConfigError(
                f"cpu_bind has cores that this process may not use: {', '.join(map(str, foreign[:8]))}; it may use "
                f"{', '.join(map(str, allowed)) or 'none by number, on this system'}",
                field="cpu_bind",
            )
        return cls(tuple(lists), is_chosen=True)

    def num_threads(self, local_rank: int, num_cores: int) -> int:
        """Return the number of threads of a rank."""
        return len(self.shares[local_rank]) if self.is_chosen else max(1, num_cores // len(self.shares))

    def cores(self, local_rank: int, num_threads: int) -> tuple[int, ...]:
        """Return the hardware threads that a rank's threads are bound to; none if there are too few in all."""
        if all(num_threads <= len(share) for share in self.shares) or self.is_chosen:
            cpus = self.shares[local_rank]
            return cpus[:num_threads] if num_threads <= len(cpus) else ()
        # Shares of whole cores differ in size; all threads of the host may be enough.
        every = [cpu for share in self.shares for cpu in share]
        first = local_rank * num_threads
        return tuple(every[first : first + num_threads]) if num_threads * len(self.shares) <= len(every) else ()

    def home(self, local_rank: int) -> tuple[int, ...]:
        """Return hardware threads on the NUMA nodes for a rank's memory; none if every node will do."""
        return self.shares[local_rank] if self.is_chosen or self.num_nodes > 1 else ()
