"""Build wheels for Linux with native kernels of all levels: `python -m tools.build_wheels`.

A source distribution is made first, and from it a wheel for each kind of processor; those of another machine are
cross-compiled (on Debian: `apt install g++-aarch64-linux-gnu`). The tag manylinux_2_28 promises that every Linux with
glibc 2.28 or later can load what is in a wheel. So the libraries in it are read again: a wheel that would break the
promise, or lacks a level, is removed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import hatch_build

ROOT: Final = Path(__file__).resolve().parent.parent
POLICY: Final = "manylinux_2_28"
# Newest version of each library's symbols that the policy (PEP 600, and auditwheel's table of it) allows.
NEWEST: Final[Mapping[str, tuple[int, ...]]] = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 24),
    "CXXABI": (1, 3, 11),
    "GCC": (7, 0, 0),
}
LIBRARIES: Final = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|ld-linux-[\w-]+)\.so\.\d")
COMPILERS: Final[Mapping[str, str]] = {"x86_64": "g++ -m64", "aarch64": "aarch64-linux-gnu-g++"}
# The compiler's own helpers come from its static library: a distribution's libgcc_s may be older than the compiler.
LINK_FLAGS: Final = "-lgcc"


class BuildError(Exception):
    """A wheel that cannot be built, or whose tag would not be true; the message says why."""


def faults_of(library: Path, machine: str) -> list[str]:
    """Return what keeps a shared library from being of `POLICY`, for a kind of processor.

    Args:
        library: path of the library.
        machine: kind of processor, as `platform.machine()` names it.
    """
    header, dynamic, versions = (_read_elf(library, flag) for flag in ("-h", "-d", "-V"))
    found = re.search(r"Machine: +(.*)", header)
    name = "" if found is None else found[1].lower().replace("-", "_")
    faults = [] if machine in name else [f"is for {name or 'no processor'}, not for {machine}"]
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    faults += [f"needs the library {each}" for each in needed if not LIBRARIES.fullmatch(each)]
    for kind, number in sorted(set(re.findall(r"Name: ([A-Z]+)_([\d.]+)", versions))):
        if tuple(map(int, number.split("."))) > NEWEST.get(kind, ()):
            faults.append(f"needs {kind} {number}")
    return faults


def build_wheel(sources: Path, out: Path, machine: str, compiler: str) -> Path:
    """Build a wheel from unpacked sources, and check it.

    Args:
        sources: folder of `pyproject.toml`.
        out: folder of the wheel.
        machine: kind of processor that the wheel is for.
        compiler: command of a compiler for it.

    Raises:
        BuildError: the build failed, a level is missing, or a library is not of the policy; there is no wheel then.
    """
    before = set(out.glob("*.whl"))
    settings = {"CXX": compiler, "LDFLAGS": LINK_FLAGS, hatch_build.PLATFORM_VARIABLE: f"{POLICY}_{machine}"}
    _hatch(sources, ["-t", "wheel", "-d", str(out)], settings)
    made = set(out.glob("*.whl")) - before
    wheel = next((each for each in made if each.name.endswith(f"-{POLICY}_{machine}.whl")), None)
    faults = ["has no kernels"] if wheel is None else _faults_in(wheel, machine)
    if wheel is None or faults:
        for each in made:
            each.unlink()
        raise BuildError(f"no wheel for {machine}, since it {', and '.join(faults)}")
    return wheel


def _faults_in(wheel: Path, machine: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
        libraries = {path.name: path for path in Path(folder).rglob("*.so")}
        wanted = [f"libquire_{level.name}.so" for level in hatch_build.levels_of(machine)]
        faults = [f"lacks {name}" for name in wanted if name not in libraries]
        for name, path in libraries.items():
            faults += [f"has {name}, which {fault}" for fault in faults_of(path, machine)]
        return faults


def unpack_sources(root: Path, folder: Path) -> Path:
    """Make the source distribution of a checkout in a folder, and return the folder of its unpacked files."""
    _hatch(root, ["-t", "sdist", "-d", str(folder)], {})
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def _hatch(folder: Path, arguments: Sequence[str], settings: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "hatchling", "build", *arguments]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _read_elf(library: Path, flag: str) -> str:
    command = ["readelf", flag, "--wide", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout


def main() -> int:
    """Build the wheels; the exit code is 1 where one cannot be built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", nargs="*", default=[*COMPILERS], metavar="MACHINE", help=", ".join(COMPILERS))
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            sources = unpack_sources(ROOT, Path(folder))
            for machine in options.machines:
                wheel = build_wheel(sources, options.out.resolve(), machine, COMPILERS[machine])
                print(f"{wheel}: {wheel.stat().st_size:,} bytes", flush=True)
    except BuildError as error:
        print(f"build_wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
