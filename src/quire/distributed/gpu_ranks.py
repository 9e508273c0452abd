"""The devices of ranks: each rank uses the GPU of its number on its host, and NCCL moves tensors between them."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch

from quire.config import ParallelConfig
from quire.distributed.device_group import DeviceRankGroup, StagedTransport
from quire.distributed.launch import LOCAL, START_TIMEOUT_S
from quire.distributed.links import RankLinks
from quire.distributed.ranks import Ranks
from quire.distributed.torchrun import TorchrunPlace
from quire.distributed.transport import DeviceTransport
from quire.errors import ConfigError, RankFailed
from quire.ops import BFLOAT16_CAPABILITY
from quire.platform.host_probe import pick_device

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Compute capability from which GPUs have bfloat16, on which the dtype of weights depends.
LOOK_S: Final = 0.1
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class RankDevice(NamedTuple):
    """Properties of a rank's device, which must be the same on all ranks.

    Args:
        kind: "cpu" or "cuda".
        has_bfloat16: False for a GPU without bfloat16.
        uses_nccl: True if NCCL moves tensors between GPUs.
    """

    kind: str
    has_bfloat16: bool = True
    uses_nccl: bool = False


def has_nccl() -> bool:
    """Return whether PyTorch was built with NCCL."""
    import torch.distributed

    dist: Any = torch.distributed  # untyped: torch's types lack the names that some builds lack
    return bool(dist.is_available() and dist.is_nccl_available())


def device_of_ranks(option: str, config: ParallelConfig, num_local: int) -> str:
    """Return the device of this host's ranks, "cpu" or "cuda".

    Args:
        option: option `device`.
        config: options of the ranks.
        num_local: number of ranks on this host.

    Raises:
        ConfigError: the host has fewer GPUs than ranks; stages on GPUs; NCCL was requested and is unavailable.
    """
    device = pick_device(option)
    backend = config.all_reduce_backend
    if device == "cpu":
        if backend == "nccl":
            raise ConfigError(
                "all_reduce_backend 'nccl' is for GPUs, and the ranks compute on CPUs: use 'auto', 'shared_memory' or "
                "'gloo'",
                field="all_reduce_backend",
            )
        return device
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"device must be 'cpu' with pipeline_parallel_size above 1 on a host with GPUs, got {option!r}: stages "
            "exchange hidden states between CPUs",
            field="device",
        )
    count = torch.cuda.device_count()
    if count < num_local:
        visible = os.environ.get(VISIBLE)
        seen = "" if visible is None else f" (with {VISIBLE}={visible!r})"
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} puts {num_local} ranks on this host, each of which "
            f"needs a GPU of its own, and PyTorch finds {count}{seen}: use fewer ranks, more hosts, or device 'cpu'",
            field="tensor_parallel_size",
        )
    if backend == "nccl" and not has_nccl():
        raise ConfigError(
            "all_reduce_backend 'nccl' was asked for, and this build of PyTorch has no NCCL: use 'auto', which goes "
            "through host memory then",
            field="all_reduce_backend",
        )
    return device


def join_devices(ranks: Ranks, config: ParallelConfig, device: str, torchrun: TorchrunPlace | None) -> None:
    """Select this rank's device, and connect the devices of all ranks for the model's tensors; all ranks call this.

    Args:
        ranks: the ranks, connected by shared memory or by sockets; on GPUs, `gpu` and `group` are set here.
        config: options of the ranks.
        device: device of this host's ranks, the result of `device_of_ranks`.
        torchrun: place among the processes of torchrun; None if Quire has started the ranks.

    Raises:
        ConfigError: ranks have devices that cannot share a model.
        RankFailed: NCCL cannot connect the ranks.
    """
    rank_device = RankDevice(device)
    if device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
        ranks.gpu = ranks.local_rank
        has_bfloat16 = torch.cuda.get_device_capability() >= BFLOAT16_CAPABILITY
        rank_device = RankDevice(device, has_bfloat16, config.all_reduce_backend in ("auto", "nccl") and has_nccl())
    store = _agree(ranks, rank_device, torchrun)
    if device == "cpu":
        return
    host, gpu = ranks.group.transport, torch.device("cuda", ranks.local_rank)
    transport: DeviceTransport = StagedTransport(host, gpu)
    if rank_device.uses_nccl:
        from quire.distributed.nccl import connect_nccl

        connect = on_gpu(ranks.gpu, lambda keys: connect_nccl(keys, host, gpu))
        transport = while_all_live(ranks.links, lambda: connect(store()))
    group = DeviceRankGroup(transport, config.distributed_timeout_s, divides_experts=config.enable_expert_parallel)
    group.on_timeout = ranks.fail
    ranks.group = group
    if ranks.is_leader:
        logger.info("Ranks: a GPU each, tensors by %s", transport.name)


def _agree(ranks: Ranks, rank_device: RankDevice, torchrun: TorchrunPlace | None) -> Callable[[], Any]:
    """Check that all ranks have such a device; return a function that opens the store in which NCCL connects them."""
    import torch.distributed

    dist: Any = torch.distributed
    server: Any = None

    def check(facts: list[Any]) -> int:
        nonlocal server
        for rank, fact in enumerate(facts):
            check_alike(rank_device, RankDevice(*fact), rank)
        if rank_device.uses_nccl and torchrun is None:
            server = dist.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
        return 0 if server is None else server.port

    port = ranks.links.agree(rank_device, check, START_TIMEOUT_S)
    if server is not None:
        return lambda: server
    return lambda: dist.TCPStore(LOCAL, port, is_master=False) if port else _torchrun_store(dist, torchrun)


def check_alike(first: RankDevice, other: RankDevice, rank: int) -> None:
    """Refuse a rank whose device differs from rank 0's in a property of `RankDevice`."""
    if other.kind != first.kind:
        raise ConfigError(
            f"device must be the same on all ranks: it is {first.kind!r} on rank 0 and {other.kind!r} on rank {rank}; "
            "say 'cpu' or 'cuda'",
            field="device",
        )
    if other.has_bfloat16 != first.has_bfloat16:
        has, lacks = (0, rank) if first.has_bfloat16 else (rank, 0)
        raise ConfigError(
            f"device 'cuda' needs GPUs that have the same dtypes: that of rank {has} computes in bfloat16, and that of "
            f"rank {lacks} does not",
            field="device",
        )
    if other.uses_nccl != first.uses_nccl:
        has, lacks = (0, rank) if first.uses_nccl else (rank, 0)
        raise ConfigError(
            f"all_reduce_backend 'auto' needs PyTorch with NCCL on all ranks or none: rank {has} has it and rank "
            f"{lacks} does not; use 'gloo'",
            field="all_reduce_backend",
        )


def _torchrun_store(dist: Any, torchrun: TorchrunPlace | None) -> Any:
    assert torchrun is not None, "without torchrun, rank 0 has the store"
    return dist.PrefixStore("quire-gpus", next(iter(dist.rendezvous("env://", torchrun.rank, torchrun.size)))[0])


def while_all_live(links: RankLinks, call: Callable[[], T], timeout_s: float = START_TIMEOUT_S) -> T:
    """Return the result of a call, made in a thread, that waits for all other ranks; raise if one of them fails."""
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, name="quire-connect", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while True:
        links.check()
        try:
            result, error = results.get(timeout=LOOK_S)
        except queue.Empty:
            if time.monotonic() < deadline:
                continue
            raise RankFailed(None, f"was not connected within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return cast(T, result)


def on_gpu(gpu: int | None, call: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return a function that calls `call` on a GPU, for another thread: a new thread's current GPU is number 0.

    Args:
        gpu: number of the GPU; None for a rank on a CPU.
        call: the function.
    """
    if gpu is None:
        return call

    def run(argument: Any) -> T:
        with torch.cuda.device(gpu):
            return call(argument)

    return run
