"""NUMA nodes and physical cores of this host, and sets of cores for the ranks on it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire.config.cpu_bind import read_cpu_list

ROOT = Path("/")
NODE = re.compile(r"node(\d+)")

# The hardware threads of a physical core, in ascending order.
Core = tuple[int, ...]


def allowed_cpus() -> tuple[int, ...]:
    """Return the hardware threads that this process may use, in ascending order; none if they are not known."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def nodes_of(allowed: Collection[int], root: Path = ROOT) -> list[list[Core]]:
    """Return the usable physical cores of each NUMA node; nodes without usable cores are left out.

    Args:
        allowed: hardware threads that may be used.
        root: folder in which `sys` is mounted. Threads without a known node are a node; a thread without known
            siblings is a core.
    """
    folder = root / "sys/devices/system/node"
    cpus_of: dict[int, set[int]] = {}
    for path in folder.glob("node*"):
        name = NODE.fullmatch(path.name)
        cpus = _list(path / "cpulist")
        if name is not None and cpus is not None:
            cpus_of[int(name[1])] = cpus & {*allowed}
    placed = set[int]().union(*cpus_of.values())
    nodes = [cpus_of[node] for node in sorted(cpus_of)]
    if unplaced := {*allowed} - placed:
        nodes.append(unplaced)
    return [_cores(node, root) for node in nodes if node]


def share_cores(nodes: Sequence[Sequence[Core]], num_ranks: int) -> list[tuple[int, ...]]:
    """Return the hardware threads of each rank, of one node unless there are fewer ranks than nodes.

    The first threads of all its cores come before the second ones; no two ranks share a core. A rank may have none.

    Args:
        nodes: cores of each node.
        num_ranks: number of ranks on this host.
    """
    shares: list[tuple[int, ...]] = []
    for rank in range(num_ranks):
        if num_ranks < len(nodes):  # several nodes each
            first, end = (len(nodes) * idx // num_ranks for idx in (rank, rank + 1))
            cores = [core for node in nodes[first:end] for core in node]
        else:
            node_idx = rank * len(nodes) // num_ranks
            ranks = [other for other in range(num_ranks) if other * len(nodes) // num_ranks == node_idx]
            node, share_idx = nodes[node_idx], ranks.index(rank)
            cores = list(node[len(node) * share_idx // len(ranks) : len(node) * (share_idx + 1) // len(ranks)])
        most = max(map(len, cores), default=0)
        shares.append(tuple(core[turn] for turn in range(most) for core in cores if turn < len(core)))
    return shares


@contextmanager
def bound_to(cpus: Collection[int]) -> Iterator[None]:
    """Bind this thread, and threads that it starts within the block, to hardware threads; change nothing for none.

    Memory is placed on the node of the thread that first touches it.
    """
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cores(cpus: Collection[int], root: Path) -> list[Core]:
    """Group hardware threads by physical core."""
    cores: dict[Core, None] = {}
    for cpu in sorted(cpus):
        siblings = _list(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or {cpu}
        cores[tuple(sorted(siblings & {*cpus} | {cpu}))] = None
    return list(cores)


def _list(path: Path) -> set[int] | None:
    """Return the numbers of a list in a file of the system; None if it cannot be read, none if it is empty."""
    try:
        text = path.read_text().strip()
        return set(read_cpu_list(text)) if text else set()
    except (OSError, ValueError):
        return None
