"""The host probe, on fabricated file trees of both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.platform.host_probe import pick_device, probe

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CORES = len(os.sched_getaffinity(0))


def tree(root: Path, files: dict[str, object]) -> Path:
    """Write files below a root; a machine of 8 GiB with 6 GiB available unless they say otherwise."""
    meminfo = f"MemTotal: {8 * GIB // KIB} kB\nMemFree: 1 kB\nMemAvailable:    {6 * GIB // KIB} kB\n"
    for name, content in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    machine = probe("cpu", tree(tmp_path, {}))
    assert (machine.device, machine.available_bytes, machine.num_threads) == ("cpu", 6 * GIB, CORES)


def test_an_unlimited_group_limits_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a",
        "sys/fs/cgroup/a/memory.max": "max",
        "sys/fs/cgroup/a/memory.current": 5 * GIB,
        "sys/fs/cgroup/a/cpu.max": "max 100000",
    }
    machine = probe("cpu", tree(tmp_path, files))
    assert (machine.available_bytes, machine.num_threads) == (6 * GIB, CORES)


def test_version_2_counts_what_is_used_but_not_the_page_cache(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/b/memory.max": 3 * GIB,
        "sys/fs/cgroup/a/b/memory.current": 2 * GIB,
        "sys/fs/cgroup/a/b/memory.stat": f"anon {GIB}\ninactive_file {100 * MIB}\nactive_file {20 * MIB}\nfile {GIB}",
    }
    assert probe("cpu", tree(tmp_path, files)).available_bytes == GIB + 120 * MIB


def test_the_tightest_group_of_the_lineage_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/b/memory.max": 5 * GIB,
        "sys/fs/cgroup/a/b/memory.current": GIB,
        "sys/fs/cgroup/a/memory.max": 3 * GIB,
        "sys/fs/cgroup/a/memory.current": 2 * GIB,
        "sys/fs/cgroup/a/cpu.max": "100000 100000",
    }
    machine = probe("cpu", tree(tmp_path, files))
    assert (machine.available_bytes, machine.num_threads) == (GIB, 1)


def test_a_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    """The path is the host's; the limits lie at the mount itself."""
    files = {
        "proc/self/cgroup": "0::/kubepods/pod7/c1",
        "sys/fs/cgroup/memory.max": 2 * GIB,
        "sys/fs/cgroup/memory.current": GIB // 2,
    }
    assert probe("cpu", tree(tmp_path, files)).available_bytes == GIB + GIB // 2


def test_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "7:cpuset:/\n4:memory:/docker/c1\n2:cpu,cpuacct:/docker/c1\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GIB,
        "sys/fs/cgroup/memory/docker/c1/memory.limit_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/docker/c1/memory.usage_in_bytes": GIB,
        "sys/fs/cgroup/memory/docker/c1/memory.stat": f"inactive_file 7\ntotal_inactive_file {MIB}",
        "sys/fs/cgroup/cpu,cpuacct/docker/c1/cpu.cfs_quota_us": 150_000,
        "sys/fs/cgroup/cpu,cpuacct/docker/c1/cpu.cfs_period_us": 100_000,
    }
    machine = probe("cpu", tree(tmp_path, files))
    assert (machine.available_bytes, machine.num_threads) == (GIB + MIB, 1)


@pytest.mark.parametrize(("quota", "expected"), [("-1", CORES), ("50000", 1), ("100000000", CORES)])
def test_version_1_quotas(tmp_path: Path, quota: str, expected: int) -> None:
    files = {
        "proc/self/cgroup": "1:cpu:/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100_000,
    }
    assert probe("cpu", tree(tmp_path, files)).num_threads == expected


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": GIB,
        "sys/fs/cgroup/memory.current": 2 * GIB,
    }
    assert probe("cpu", tree(tmp_path, files)).available_bytes == 0


def test_a_machine_without_proc_has_its_physical_memory(tmp_path: Path) -> None:
    assert probe("cpu", tmp_path).available_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_this_machine_has_memory_and_cores() -> None:
    machine = probe("cpu")
    assert 1 << 20 < machine.available_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 <= machine.num_threads <= CORES


def test_devices() -> None:
    assert pick_device("cpu") == "cpu"
    if torch.cuda.is_available():
        assert pick_device("auto") == pick_device("cuda") == "cuda"
    else:
        assert pick_device("auto") == "cpu"
        with pytest.raises(ConfigError, match="device 'cuda' was asked for") as caught:
            pick_device("cuda")
        assert caught.value.field == "device"


@pytest.mark.gpu
def test_a_gpu_has_free_memory() -> None:
    machine = probe("cuda")
    assert 0 < machine.available_bytes <= torch.cuda.mem_get_info()[1]
