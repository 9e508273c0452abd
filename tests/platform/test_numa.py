"""NUMA nodes on fabricated file trees, and what ranks get of their cores."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from quire.platform.numa import allowed_cpus, bound_to, nodes_of, share_cores
from tests.platform.test_host_probe import tree


def host(root: Path, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    """Write the files of a host; `siblings` by the first thread of each core."""
    files: dict[str, object] = {f"sys/devices/system/node/node{node}/cpulist": text for node, text in nodes.items()}
    files |= {"sys/devices/system/node/possible": "0-1", "sys/devices/system/node/nodes/cpulist": "0"}
    for text in siblings.values():
        for cpu in text.split(","):
            files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = text
    return tree(root, files)


def test_threads_of_a_core_and_cores_of_a_node_are_together(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu},{cpu + 8}" for cpu in range(8)}
    root = host(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15", 2: ""}, siblings)
    nodes = nodes_of(range(16), root)
    assert nodes == [[(0, 8), (1, 9), (2, 10), (3, 11)], [(4, 12), (5, 13), (6, 14), (7, 15)]]
    # What may not be used is left out; what no node has is one of its own.
    assert nodes_of([1, 9, 12, 20], root) == [[(1, 9)], [(12,)], [(20,)]]
    assert share_cores(nodes, 2) == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert share_cores(nodes, 4) == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]
    assert share_cores(nodes, 1) == [tuple(range(16))]
    # Two of three ranks share a node.
    assert share_cores(nodes, 3) == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]


def test_nodes_are_numbers_and_ranks_may_have_several(tmp_path: Path) -> None:
    root = host(tmp_path, {10: "6,7", 2: "2,3", 0: "0,1", 3: "4,5"}, {})
    nodes = nodes_of(range(8), root)
    assert nodes == [[(0,), (1,)], [(2,), (3,)], [(4,), (5,)], [(6,), (7,)]]
    assert share_cores(nodes, 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert share_cores(nodes, 3) == [(0, 1), (2, 3), (4, 5, 6, 7)]


def test_ranks_never_share_a_core_and_leave_none() -> None:
    for sizes in ([1], [2], [3, 1], [4, 4, 2], [1, 1, 1, 1, 1]):
        cpus = iter(range(100))
        nodes = [[(next(cpus), next(cpus)) for _ in range(size)] for size in sizes]
        for num_ranks in range(1, 9):
            shares = share_cores(nodes, num_ranks)
            found = sorted(cpu for each in shares for cpu in each)
            assert found == sorted(cpu for node in nodes for core in node for cpu in core), (sizes, num_ranks)


def test_without_files_there_is_one_node_of_single_threads(tmp_path: Path) -> None:
    assert nodes_of([3, 1], tree(tmp_path, {})) == [[(1,), (3,)]]
    damaged: dict[str, object] = {"sys/devices/system/node/node0/cpulist": "0-x"}
    assert nodes_of([3, 1], tree(tmp_path, damaged)) == [[(1,), (3,)]]


def test_this_host_has_nodes_with_all_cores() -> None:
    if not allowed_cpus():
        pytest.skip("this system does not tell")
    assert sorted(cpu for node in nodes_of(allowed_cpus()) for core in node for cpu in core) == [*allowed_cpus()]


def test_a_thread_is_bound_for_a_while() -> None:
    if len(allowed_cpus()) < 2:
        pytest.skip("one core, or a system that binds no threads")
    before = os.sched_getaffinity(0)
    with bound_to(()):
        assert os.sched_getaffinity(0) == before
    second = allowed_cpus()[1]
    with suppress(KeyError), bound_to([second]):
        assert os.sched_getaffinity(0) == {second}
        raise KeyError
    assert os.sched_getaffinity(0) == before
