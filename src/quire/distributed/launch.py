"""Starts the ranks of a model on this host, as processes that are connected to this one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from quire.config import ParallelConfig
from quire.distributed.cpu_sets import CpuSets
from quire.distributed.links import LEADER, RankLinks
from quire.distributed.rank_group import RankGroup
from quire.distributed.ranks import Ranks
from quire.distributed.shared_memory import SharedMemoryTransport, has_shared_memory, make_memory
from quire.distributed.shared_stages import make_stages_memory, share_stages
from quire.distributed.transport import Transport
from quire.errors import ConfigError, WorkerError
from quire.ops.cpu.native_library import NativeLibrary, find_library
from quire.platform.child_process import ChildProcess
from quire.platform.host_probe import num_cores

# Imports take seconds, on a busy machine a minute.
START_TIMEOUT_S: Final = 300.0
LOCAL: Final = "127.0.0.1"


def start_ranks(
    config: ParallelConfig, options: dict[str, Any], program: str, compare: Callable[[RankLinks], None]
) -> Ranks:
    """Start the other ranks of a model, of which this process is rank 0.

    Args:
        config: options of the ranks.
        options: a JSON value for the other ranks.
        program: function of the other ranks as "module:function"; its arguments are its rank, and the
            descriptors of its connection and of shared memory, -1 for none.
        compare: function that compares this rank with the others, which call `join_ranks` with its counterpart.

    Raises:
        ConfigError: shared memory was requested and is unavailable, or the ranks cannot have the cores of `cpu_bind`.
        RanksDiffer: a rank differs from this one.
        WorkerError: a process does not start.
    """
    size = config.num_ranks
    cpus = CpuSets.of(config.cpu_bind, size)
    library = pick_library(config.all_reduce_backend)
    with ExitStack() as stack:
        try:
            memory = -1 if library is None else make_shared(library, config)
            if memory >= 0:
                stack.callback(os.close, memory)
            folder = tempfile.mkdtemp(prefix="quire-ranks-")
        except OSError as error:
            raise WorkerError(f"the ranks cannot be connected: {error.strerror or error}") from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        sockets: dict[int, socket.socket] = {}
        processes: list[ChildProcess] = []
        try:
            for rank in range(1, size):
                sockets[rank], theirs = socket.socketpair()
                with theirs:
                    processes.append(_start(program, rank, theirs.fileno(), memory))
        except OSError as error:
            _kill(processes)
            raise WorkerError(f"a rank does not start: {error.strerror or error}") from error
        links = RankLinks(LEADER, sockets, lambda rank: describe_end(processes[rank - 1]))
        try:
            store = str(Path(folder) / "store")
            setup = {"options": options, "parallel": asdict(config), "store": store, "cpus": cpus}
            for rank in sockets:
                links.send_fact(rank, setup)
            # Ranks answer when their imports are done, which may take longer than the group's timeout.
            for rank in sockets:
                links.receive_fact(rank, START_TIMEOUT_S)
            compare(links)
            group = make_group(library, memory, LEADER, config, store)
            # The store is removed after this, so wait until all ranks have read it.
            for rank in sockets:
                links.receive_fact(rank, START_TIMEOUT_S)
        except BaseException:
            links.close()
            _kill(processes)
            raise
    return Ranks(group, links, cpus, LEADER, processes)


def join_ranks(
    rank: int, connection: int, memory: int, compare: Callable[[RankLinks, dict[str, Any]], None]
) -> tuple[Ranks, dict[str, Any]]:
    """Connect a process that `start_ranks` has started; return the ranks, and the `options` of rank 0's call.

    Args:
        rank, connection, memory: arguments of the process.
        compare: function that compares this rank, which has these options, with the others.

    Raises:
        RanksDiffer: a rank differs from rank 0.
        WorkerError: a rank has failed.
    """
    links = RankLinks(rank, {LEADER: socket.socket(fileno=connection)})
    with links.joining():
        setup = links.receive_fact(LEADER, START_TIMEOUT_S)
        library = find_library() if memory >= 0 else None
        if isinstance(library, str):
            raise WorkerError(f"rank {rank} has no native kernels: {library}")
        links.send_fact(LEADER, "started")
        compare(links, setup["options"])
        group = make_group(library, memory, rank, ParallelConfig(**setup["parallel"]), setup["store"])
        links.send_fact(LEADER, "connected")
    shares, *others = setup["cpus"]
    return Ranks(group, links, CpuSets(tuple(map(tuple, shares)), *others), rank), setup["options"]


def pick_library(backend: str) -> NativeLibrary | None:
    """Return the native kernels for sums in shared memory; None for gloo."""
    if backend == "gloo":
        return None
    library = find_library()
    why = library if isinstance(library, str) else None if has_shared_memory() else "this system has no memfd_create"
    if why is None:
        assert isinstance(library, NativeLibrary)
        return library
    if backend == "shared_memory":
        raise ConfigError(f"all_reduce_backend 'shared_memory' cannot be had: {why}", field="all_reduce_backend")
    return None


def make_shared(library: NativeLibrary, config: ParallelConfig) -> int:
    """Return the descriptor of new memory for the ranks of this host."""
    page_bytes = library.ranks.page_bytes
    if config.pipeline_parallel_size > 1:
        return make_stages_memory(page_bytes, config)
    return make_memory(page_bytes, config.num_ranks)


def make_group(
    library: NativeLibrary | None,
    memory: int,
    rank: int,
    config: ParallelConfig,
    store: Any,
    hostname: str = LOCAL,
    sums: Transport | None = None,
) -> RankGroup:
    """Return the group of a rank: in shared memory, or by gloo if `library` is None."""
    size, timeout_s, is_pipeline = config.num_ranks, config.distributed_timeout_s, config.pipeline_parallel_size > 1
    if library is not None:
        if is_pipeline:
            return share_stages(library, memory, rank, config, num_cores())
        shared = SharedMemoryTransport(library, memory, rank, range(size), timeout_s, polls=size <= num_cores())
        return RankGroup(shared, divides_experts=config.enable_expert_parallel)
    import torch.distributed

    from quire.distributed.gloo import GlooTransport, connect_by_gloo

    dist: Any = torch.distributed  # untyped: torch's types lack the names that some builds lack
    if isinstance(store, str):
        store = dist.FileStore(store, size)
    if is_pipeline:
        return connect_by_gloo(store, rank, config, hostname, sums)
    return RankGroup(
        GlooTransport(store, rank, size, timeout_s, hostname), divides_experts=config.enable_expert_parallel
    )


def describe_end(process: subprocess.Popen[bytes]) -> str:
    """Describe how a process has ended."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return f"(process {process.pid}) has closed its connection"
    if code < 0:
        return f"(process {process.pid}) was ended by {signal.Signals(-code).name}"
    return f"(process {process.pid}) has ended with exit status {code}"


def _start(program: str, rank: int, connection: int, memory: int) -> ChildProcess:
    return ChildProcess(
        program,
        rank,
        connection,
        memory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor for descriptor in (connection, memory) if descriptor >= 0],
    )


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
