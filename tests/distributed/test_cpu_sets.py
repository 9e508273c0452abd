"""The cores of ranks: what `cpu_bind` means on a host, and values that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import EngineConfig
from quire.config.cpu_bind import read_cpu_list
from quire.distributed.cpu_sets import CpuSets
from quire.errors import ConfigError


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process have the threads 0 to 7 of two nodes, each of two cores of two threads."""
    monkeypatch.setattr("quire.distributed.cpu_sets.allowed_cpus", lambda: tuple(range(8)))
    nodes = [[(0, 4), (1, 5)], [(2, 6), (3, 7)]]
    monkeypatch.setattr("quire.distributed.cpu_sets.nodes_of", lambda _: nodes)


@pytest.mark.usefixtures("eight")
def test_ranks_have_cores_of_their_own_node_where_these_are_enough() -> None:
    two = CpuSets.of("auto", 2)
    assert [two.cores(rank, 3) for rank in range(2)] == [(0, 1, 4), (2, 3, 6)]
    assert two.num_threads(0, 8) == 4
    assert two.home(1) == (2, 3, 6, 7)
    assert two.cores(0, 5) == ()
    # Two ranks share a node, and the third one's is twice as large: three threads each are had across nodes.
    three = CpuSets.of("auto", 3)
    assert [three.cores(rank, 2) for rank in range(3)] == [(0, 4), (1, 5), (2, 3)]
    assert CpuSets(((0, 4), (1, 5, 2, 6), (3, 7))).cores(1, 2) == (1, 5)
    uneven = CpuSets(((0,), (1, 2, 3)))
    assert [uneven.cores(rank, 2) for rank in range(2)] == [(0, 1), (2, 3)]
    assert uneven.home(0) == ()


@pytest.mark.usefixtures("eight")
def test_lists_of_cores() -> None:
    chosen = CpuSets.of("0,2-3|5", 2)
    assert chosen.shares == ((0, 2, 3), (5,))
    assert [chosen.num_threads(rank, 8) for rank in range(2)] == [3, 1]
    assert [chosen.cores(rank, 1) for rank in range(2)] == [(0,), (5,)]
    assert chosen.home(0) == (0, 2, 3)
    none = CpuSets.of("none", 2)
    assert none.shares == ((), ())
    assert none.cores(0, 1) == none.home(0) == ()
    assert none.num_threads(0, 8) == 4
    with pytest.raises(ConfigError, match="a list of cores for each of the 3 ranks on this host, got 2") as refused:
        CpuSets.of("0|1", 3)
    assert refused.value.field == "cpu_bind"
    with pytest.raises(ConfigError, match="may not use: 8, 9; it may use 0, 1, 2") as refused:
        CpuSets.of("0|7-9", 2)
    assert refused.value.field == "cpu_bind"


def test_lists_are_read() -> None:
    assert read_cpu_list("3") == (3,)
    assert read_cpu_list(" 8-9, 0-2,1") == (8, 9, 0, 1, 2)


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"cpu_bind": 3}, "cpu_bind", "got 3"),
        ({"cpu_bind": None}, "cpu_bind", "got None"),
        ({"cpu_bind": ""}, "cpu_bind", "'' is no number"),
        ({"cpu_bind": "0|"}, "cpu_bind", "'' is no number"),
        ({"cpu_bind": "0-1|b"}, "cpu_bind", "'b' is no number, and no range"),
        ({"cpu_bind": "0-|1"}, "cpu_bind", "'0-' is no number"),
        ({"cpu_bind": "3-2|1"}, "cpu_bind", "'3-2' is no range of cores"),
        ({"cpu_bind": "0-99999999999|1"}, "cpu_bind", "is no range of cores"),
        ({"cpu_bind": "0-3|3-4"}, "cpu_bind", "each core in one list, got 3 in two: '0-3|3-4'"),
        ({"cpu_bind": "0|1|2"}, "cpu_bind", "has 3 lists of cores, more than there are ranks (2)"),
        ({"cpu_bind": "0-3", "tensor_parallel_size": 1}, "cpu_bind", "taskset binds one process"),
        ({"cpu_bind": "0-3|4", "num_threads": 2}, "num_threads", "which is 1, got 2"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_options(**{"tensor_parallel_size": 2, **options})
    assert refused.value.field == field
    assert words in str(refused.value)


@pytest.mark.parametrize("options", [{"cpu_bind": "none"}, {"cpu_bind": "auto", "tensor_parallel_size": 1}])
def test_values_that_are_allowed(options: dict[str, Any]) -> None:
    assert EngineConfig.from_options(**{"tensor_parallel_size": 2, **options}).parallel.cpu_bind == options["cpu_bind"]
