"""Ranks that torchrun has started, on one or several hosts: they connect through its variables and its store."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from quire.config import ParallelConfig
from quire.distributed.cpu_sets import CpuSets
from quire.distributed.launch import LOCAL, make_group, make_shared, pick_library
from quire.distributed.links import LEADER, RankLinks
from quire.distributed.pipeline import RankGrid
from quire.distributed.rank_group import RankGroup
from quire.distributed.ranks import Ranks
from quire.distributed.shared_memory import SharedMemoryTransport, make_memory
from quire.distributed.transport import Transport, is_loopback
from quire.errors import ConfigError, RankFailed, WorkerError
from quire.ops.cpu.native_library import NativeLibrary
from quire.platform.host_probe import num_cores

# Time for all ranks to find each other.
RENDEZVOUS_TIMEOUT_S: Final = 300.0
VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TOKEN_BYTES: Final = 32
# Limits of connections that have not said which rank they are: bytes of the line, seconds, and their number.
MAX_HELLO: Final = 4 * TOKEN_BYTES
HELLO_S: Final = 10.0
MOST_STRANGERS: Final = 64
# Wait before the next connection is accepted, after one could not be.
RETRY_S: Final = 0.1
# A host that has gone silent is noticed after these times, in seconds and attempts.
KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}


class TorchrunPlace(NamedTuple):
    """The place of this process among the processes that torchrun has started.

    Args:
        rank, size: number of this rank, and number of ranks.
        local_rank, num_local: the same on this host.
        address: name or address of the first host.
    """

    rank: int
    size: int
    local_rank: int
    num_local: int
    address: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> TorchrunPlace | None:
        """Read torchrun's variables; None if it has not started this process, or started only one."""
        if not all(name in environment for name in VARIABLES):
            return None
        numbers = {}
        for name, default in (("RANK", ""), ("WORLD_SIZE", ""), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
            text = environment.get(name, default)
            if not text.isdigit():
                raise ConfigError(f"the environment variable {name}, which torchrun sets, must be a number: {text!r}")
            numbers[name] = int(text)
        rank, size, local_rank, num_local = numbers.values()
        return cls(rank, size, local_rank, num_local, environment["MASTER_ADDR"]) if size > 1 else None


def torchrun_place(config: ParallelConfig) -> TorchrunPlace | None:
    """Return this process' place among the ranks of torchrun; None if Quire starts the ranks."""
    return TorchrunPlace.of(os.environ) if config.num_ranks > 1 else None


def check_size(config: ParallelConfig, torchrun: TorchrunPlace) -> None:
    """Refuse another number of processes of torchrun than the model has ranks."""
    if torchrun.size != config.num_ranks:
        sizes = {name: getattr(config, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        parallel_sizes = {name: size for name, size in sizes.items() if size > 1}
        names, numbers = " x ".join(parallel_sizes), " x ".join(map(str, parallel_sizes.values()))
        raise ConfigError(
            f"{names} must be the number of processes that torchrun has started ({torchrun.size}), got {numbers}",
            field=[*parallel_sizes][-1],
        )


def join_torchrun(config: ParallelConfig, torchrun: TorchrunPlace, compare: Callable[[RankLinks], None]) -> Ranks:
    """Connect to the other ranks; all of them call this. An error of a rank is raised on all.

    Args:
        config: options of the ranks.
        torchrun: place of this process.
        compare: function that compares this rank with the others, before they exchange anything else.

    Raises:
        ConfigError: shared memory was requested and is unavailable, the ranks cannot have the cores of `cpu_bind`, or
            an interface of gloo cannot be used.
        RanksDiffer: a rank differs from rank 0.
        WorkerError: a rank does not connect.
    """
    import torch.distributed

    dist: Any = torch.distributed  # untyped: torch's types lack the names that some builds lack
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", torchrun.rank, torchrun.size)))
        store = dist.PrefixStore("quire", store)
        connect = _lead if torchrun.rank == LEADER else _follow
        links, address = connect(store, torchrun)
    except RuntimeError as error:
        raise WorkerError(f"rank {torchrun.rank} finds no store at {torchrun.address}: {error}") from error
    with links.joining():
        compare(links)
        cpus = CpuSets.of(config.cpu_bind, torchrun.num_local)
        group = _make_group(config, torchrun, store, links, _agree_on_address(links, address))
    return Ranks(group, links, cpus, torchrun.local_rank)


def _lead(store: Any, torchrun: TorchrunPlace) -> tuple[RankLinks, str]:
    """Accept a connection from each other rank, which proves itself by a secret from the store.

    Returns:
        The connections, and the address at which ranks of other hosts have reached this one.
    """
    token = secrets.token_hex(TOKEN_BYTES)
    sockets: dict[int, socket.socket] = {}
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    listener, host = _listen(torchrun)
    with listener:
        store.set("links", json.dumps([host, listener.getsockname()[1], token]))
        for hello, connection in _read_hellos(listener, deadline):
            secret, _, rank = hello.decode("ascii", "replace").strip().partition(" ")
            is_known = secrets.compare_digest(secret.encode(), token.encode()) and rank.isdigit()
            if is_known and 0 < int(rank) < torchrun.size and int(rank) not in sockets:
                _keep_alive(connection)
                sockets[int(rank)] = connection
            else:
                connection.close()
            if len(sockets) == torchrun.size - 1:
                break
        else:
            missing = next(rank for rank in range(1, torchrun.size) if rank not in sockets)
            raise RankFailed(missing, f"did not come within {RENDEZVOUS_TIMEOUT_S:g} s")
    addresses = [connection.getsockname()[0] for connection in sockets.values()]
    return RankLinks(LEADER, sockets), min(addresses, key=is_loopback)


def _listen(torchrun: TorchrunPlace) -> tuple[socket.socket, str]:
    """Return a socket that listens on rank 0's host, and the address or name at which the other ranks reach it.

    It listens at the address of torchrun's first host. That host itself may resolve its name to a loopback address, or
    not have the address (a forwarded one): then it listens at all addresses, and the others use the name.
    """
    if torchrun.num_local == torchrun.size:
        return socket.create_server((LOCAL, 0), backlog=torchrun.size), LOCAL
    family, _, _, _, place = socket.getaddrinfo(torchrun.address, 0, type=socket.SOCK_STREAM)[0]
    host = str(place[0])
    if not is_loopback(host):
        with suppress(OSError):
            return socket.create_server((host, 0), family=family, backlog=torchrun.size), host
    return socket.create_server(("", 0), family=family, backlog=torchrun.size), torchrun.address


def _agree_on_address(links: RankLinks, address: str) -> str:
    """Return the address at which this rank's sockets listen for other ranks.

    It is this host's address in the connections with rank 0. A rank that reached rank 0 by a loopback address is on its
    host, and has the address at which others reached rank 0.
    """
    from quire.distributed.gloo import socket_interfaces

    socket_interfaces()  # an error here is raised on all ranks, since all wait for each other next
    leader = links.agree(address, lambda addresses: addresses[LEADER], RENDEZVOUS_TIMEOUT_S)
    return str(leader) if is_loopback(address) else address


def _read_hellos(listener: socket.socket, deadline_s: float) -> Iterator[tuple[bytes, socket.socket]]:
    """Yield the first line of each connection, until a time; one that is slow to send it delays no other.

    Not more than the line is read: facts of the rank may follow it. At most `MOST_STRANGERS` connections wait for their
    line, `HELLO_S` each; beyond that, the oldest is closed.
    """
    waiting: dict[socket.socket, tuple[bytes, float]] = {}
    try:
        while (now_s := time.monotonic()) < deadline_s:
            for connection in [one for one, (_, since_s) in waiting.items() if now_s - since_s > HELLO_S]:
                del waiting[connection]
                connection.close()
            for ready in select.select([listener, *waiting], [], [], min(1.0, deadline_s - now_s))[0]:
                if ready is listener:
                    try:
                        waiting[listener.accept()[0]] = b"", now_s
                    except OSError:  # it has left already, or there is no descriptor for it now
                        time.sleep(RETRY_S)
                    if len(waiting) > MOST_STRANGERS:
                        oldest = next(iter(waiting))
                        del waiting[oldest]
                        oldest.close()
                    continue
                if ready not in waiting:
                    continue
                hello, since_s = waiting.pop(ready)
                part = b""
                with suppress(OSError):
                    part = ready.recv(MAX_HELLO - len(hello), socket.MSG_PEEK)
                    part = ready.recv(part.find(b"\n") + 1 or len(part))
                hello += part
                if hello.endswith(b"\n"):
                    yield hello, ready
                elif part and len(hello) < MAX_HELLO:
                    waiting[ready] = hello, since_s
                else:
                    ready.close()
    finally:
        for connection in waiting:
            connection.close()


def _follow(store: Any, torchrun: TorchrunPlace) -> tuple[RankLinks, str]:
    """Connect to rank 0; return the connection, and the address of this host in it."""
    host, port, token = json.loads(store.get("links"))
    try:
        connection = socket.create_connection((host, port), RENDEZVOUS_TIMEOUT_S)
    except OSError as error:
        raise RankFailed(LEADER, f"cannot be reached at {host}:{port} ({error})") from error
    connection.sendall(f"{token} {torchrun.rank}\n".encode())
    _keep_alive(connection)
    return RankLinks(torchrun.rank, {LEADER: connection}), connection.getsockname()[0]


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _make_group(
    config: ParallelConfig, torchrun: TorchrunPlace, store: Any, links: RankLinks, address: str
) -> RankGroup:
    """Return the group that all ranks support: in shared memory if all are on one host, else by gloo at an address.

    With several hosts, the sums of a stage are computed in shared memory if its ranks are on one host.
    """
    rank, size = torchrun.rank, torchrun.size
    library = pick_library(config.all_reduce_backend)
    memory = -1

    def share(can_share: list[bool]) -> str | None:
        nonlocal memory
        if not all(can_share):
            return None
        assert library is not None
        memory = make_shared(library, config)
        return _path_of(memory)

    path = links.agree(library is not None and torchrun.num_local == size, share, RENDEZVOUS_TIMEOUT_S)
    if rank != LEADER and path is not None:
        memory = _open_memory(path)
    try:
        if links.agree(memory >= 0, all, RENDEZVOUS_TIMEOUT_S):
            return make_group(library, memory, rank, config, store)
    finally:
        if memory >= 0:
            os.close(memory)
    sums = _share_sums(config, torchrun, store, library)
    if config.all_reduce_backend == "shared_memory" and sums is None:
        raise ConfigError(
            "all_reduce_backend 'shared_memory' needs all ranks that sum with each other on one host",
            field="all_reduce_backend",
        )
    return make_group(None, -1, rank, config, store, address, sums)


def _share_sums(
    config: ParallelConfig, torchrun: TorchrunPlace, store: Any, library: NativeLibrary | None
) -> Transport | None:
    """Return the transport of the ranks of a stage in shared memory; None if they cannot share memory.

    All ranks reach the same result: each publishes its capability in the store.
    """
    grid, rank = RankGrid.of(config), torchrun.rank
    stage = grid.stage_of(rank)
    members, first_here = grid.ranks_of(stage), rank - torchrun.local_rank
    local_ranks = range(first_here, first_here + torchrun.num_local)
    if grid.num_stages == 1 or grid.tensor_size == 1 or not set(members) <= set(local_ranks):
        return None
    memory = -1
    if rank == members[0]:
        if library is not None:
            memory = make_memory(library.ranks.page_bytes, len(members))
        store.set(f"sums-{stage}", _path_of(memory))
    elif library is not None:
        memory = _open_memory(store.get(f"sums-{stage}").decode())
    store.set(f"sums-{stage}-{rank}", "1" if memory >= 0 else "0")
    can_share = [store.get(f"sums-{stage}-{member}") == b"1" for member in members]
    try:
        if not all(can_share):
            return None
        assert library is not None
        polls = torchrun.num_local <= num_cores()
        return SharedMemoryTransport(library, memory, rank, members, config.distributed_timeout_s, polls=polls)
    finally:
        if memory >= 0:
            os.close(memory)


def _path_of(memory: int) -> str:
    """Return the path by which other processes of this host open memory."""
    return f"/proc/{os.getpid()}/fd/{memory}"


def _open_memory(path: str) -> int:
    """Return the descriptor of another process' memory; -1 where it cannot be opened."""
    try:
        return os.open(Path(path), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
