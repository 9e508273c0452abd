"""The conditions of a figure: the machine, the versions, the commit, and the memory bandwidth of this minute."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import time
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BUILD = HERE.parent / ".cache" / "bench"
PACKAGES = ("torch", "transformers", "tokenizers", "quire")


def facts() -> dict[str, Any]:
    """Return the machine, the versions and the commit."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "commit": commit(),
    }


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_name() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version_of(package: str) -> str | None:
    """Return an installed package's version, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit, with "+changes" where the working tree differs in more than results; None without one."""
    shown = _git("rev-parse", "--short", "HEAD")
    if shown is None:
        return None
    return shown + (
        "+changes" if _git("status", "--porcelain", "--untracked-files=no", "--", "..", ":!results") else ""
    )


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held since its program was started."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


class MachineProbe:
    """The bandwidth of memory at this moment, measured by a small C program; none without a compiler."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def read_gb_s(self) -> float | None:
        """Return the bandwidth of reading memory in GB/s, or None where it cannot be measured."""
        if self._program is None:
            return None
        time.sleep(0.3)  # threads of the engine that has just finished spin for a while before they sleep
        env = os.environ | {"OMP_NUM_THREADS": str(self._num_threads)}
        done = subprocess.run([str(self._program)], capture_output=True, text=True, check=True, env=env)
        return float(done.stdout.split()[0])

    @cached_property
    def _program(self) -> Path | None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            return None
        BUILD.mkdir(parents=True, exist_ok=True)
        program = BUILD / "bandwidth"
        command = [compiler, "-O3", "-march=native", "-fopenmp", "-o", str(program), str(HERE / "bandwidth.c")]
        return program if subprocess.run(command, check=False).returncode == 0 else None


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write `results/<name>.json`: the facts and the figures."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"facts": facts(), **figures}, indent=1) + "\n", encoding="utf-8")
    return path


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=HERE)
    return done.stdout.strip() if done.returncode == 0 else None
