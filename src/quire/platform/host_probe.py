"""Device, memory and cores that this process may use, including limits of control groups."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from quire.config import Machine
from quire.errors import ConfigError

ROOT = Path("/")


def pick_device(option: str) -> str:
    """Return "cpu" or "cuda" for a device option.

    Args:
        option: "cpu", "cuda", or "auto" for a GPU if there is one.

    Raises:
        ConfigError: the option is "cuda", and there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if option == "cuda" and not has_gpu:
        raise ConfigError(
            "device 'cuda' was asked for, but PyTorch finds no CUDA GPU here; use 'cpu' or 'auto'", field="device"
        )
    if option == "auto":
        return "cuda" if has_gpu else "cpu"
    return option


def probe(device: str, root: Path = ROOT) -> Machine:
    """Return the memory that is available on the device, and the number of cores.

    Args:
        device: "cpu" or "cuda".
        root: folder in which `proc` and `sys` are mounted.
    """
    groups = ControlGroups(root)
    total_bytes = None
    host_bytes = max(0, min([_available_bytes(root), *groups.memory_headrooms()]))
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        # Memory that PyTorch has reserved but not allocated is free for the next tensor.
        available_bytes = free_bytes + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    else:
        available_bytes = host_bytes
    return Machine(
        device=device,
        available_bytes=max(0, available_bytes),
        num_threads=_cores_within(groups),
        host_bytes=host_bytes if device == "cuda" else None,
        total_bytes=total_bytes,
    )


def num_cores(root: Path = ROOT) -> int:
    """Return the number of whole cores that this process may use; see `probe` for `root`."""
    return _cores_within(ControlGroups(root))


class ControlGroups:
    """The control groups of this process, of version 1 and version 2."""

    def __init__(self, root: Path) -> None:
        mount = root / "sys/fs/cgroup"
        self._unified: list[Path] = []
        self._memory: list[Path] = []
        self._cpu: list[Path] = []
        for line in (_read(root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                self._unified = _lineage(mount, path)
            if "memory" in controllers.split(","):
                self._memory = _lineage(mount / "memory", path)
            if "cpu" in controllers.split(","):
                self._cpu = _lineage(mount / "cpu", path) + _lineage(mount / controllers, path)

    def memory_headrooms(self) -> Iterator[int]:
        """Yield the bytes left below the memory limit of each group that has one."""
        for group in self._unified:
            yield from _headroom(group, "memory.max", "memory.current", "")
        for group in self._memory:
            yield from _headroom(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")

    def cpu_quotas(self) -> Iterator[int]:
        """Yield the number of whole cores in the CPU quota of each group."""
        for group in self._unified:
            quota, _, period = (_read(group / "cpu.max") or "max").partition(" ")
            if quota.isdigit() and period.strip().isdigit():
                yield int(quota) // int(period)
        for group in self._cpu:
            quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
            if quota_us is not None and period_us:
                yield quota_us // period_us


def _lineage(mount: Path, path: str) -> list[Path]:
    """Return the folders of a group and of all groups above it; the tightest of their limits applies.

    In a container, the group's path is often not visible; instead, the group is the root of the mount.
    """
    group = mount / path.lstrip("/")
    groups = [group, *group.parents]
    return groups[: groups.index(mount) + 1]


def _headroom(group: Path, limit_name: str, usage_name: str, prefix: str) -> Iterator[int]:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None:
        return
    # Pages of files count as used, but the kernel drops them before it refuses memory.
    reclaimable = 0
    for line in (_read(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in (f"{prefix}active_file", f"{prefix}inactive_file"):
            reclaimable += int(value)
    yield limit - usage + min(reclaimable, usage)


def swap_bytes(root: Path = ROOT) -> int:
    """Return the free bytes of the host's swap space; 0 in a control group with a limit, or if it is not known."""
    return 0 if any(True for _ in ControlGroups(root).memory_headrooms()) else _memory_info(root, "SwapFree") or 0


def _memory_info(root: Path, wanted: str) -> int | None:
    """Return the bytes of a field of Linux's memory statistics."""
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    return None


def _available_bytes(root: Path) -> int:
    available_bytes = _memory_info(root, "MemAvailable")
    if available_bytes is not None:
        return available_bytes
    # On other systems: all physical memory; the KV cache takes the configured share of it.
    if sys.platform == "win32":
        kilobytes = ctypes.c_ulonglong()
        ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))
        return kilobytes.value * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cores_within(groups: ControlGroups) -> int:
    return max(1, min([_num_cores(), *groups.cpu_quotas()]))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """Return the number in a file; None for no file, "max" or -1, which all mean no limit."""
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None
