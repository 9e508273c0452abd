"""Ranks as threads of one process, over the memory that ranks of a host share: quick, and with the real kernels."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch

from quire.distributed.rank_group import RankGroup
from quire.distributed.shared_memory import SharedMemoryTransport, has_shared_memory, make_memory
from quire.ops.cpu.native_library import NativeLibrary, find_library

T = TypeVar("T")
G = TypeVar("G", bound=RankGroup)
TIMEOUT_S = 60.0


def native_library() -> NativeLibrary:
    """Return the library; the test is skipped where there is none."""
    library = find_library()
    if isinstance(library, str) or not has_shared_memory():
        pytest.skip("ranks share memory by native kernels, on Linux")
    return library


def make_transports(size: int, timeout_s: float = TIMEOUT_S) -> list[SharedMemoryTransport]:
    """Return the transports of the ranks of a new group."""
    library = native_library()
    descriptor = make_memory(library.ranks.page_bytes, size)
    try:
        return [
            SharedMemoryTransport(library, descriptor, rank, range(size), timeout_s, polls=size <= 2)
            for rank in range(size)
        ]
    finally:
        os.close(descriptor)


def run_ranks(size: int, body: Callable[[RankGroup], T], transports: Any = None) -> list[T]:
    """Run a function on each rank, in a thread each; see `run_groups`."""
    return run_groups([RankGroup(transport) for transport in transports or make_transports(size)], body)


def run_groups(groups: Sequence[G], body: Callable[[G], T]) -> list[T]:
    """Run a function on each rank, in a thread each; return the results by rank.

    The first error of any rank ends the waits of the others, and is raised.

    Args:
        groups: the group as each rank has it.
        body: the function.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(group: G) -> None:
        try:
            with torch.inference_mode():
                results[group.rank] = body(group)
        except BaseException as error:
            errors.append(error)
            for each in groups:
                each.fail(group.rank)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(groups))]
