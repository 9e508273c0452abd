"""Compile the native kernels: one shared library for each instruction-set level, all from the same sources.

Hatchling calls the hook at the end of this file for a wheel and for an editable install; `python hatch_build.py` does
the same in a checkout and needs the standard library only. The sources include neither torch nor Python, so a C++17
compiler is all it takes. Where there is none, the package is built without libraries and computes with torch alone.

CXX and LDFLAGS are read as by make. QUIRE_WHEEL_PLATFORM, such as "manylinux_2_28_aarch64", is the platform of a wheel
that is made for another machine; `tools/build_wheels.py` sets it, and checks that it is true.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path("src", "quire", "ops", "native")
RECORD = ".build-record"
PLATFORM_VARIABLE = "QUIRE_WHEEL_PLATFORM"
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # The harmless part of -ffast-math: NaN, infinities and the order of sums keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    # GCC 12 warns of the undefined vectors in its own AVX-512 intrinsics; clang has no such warning to turn off.
    *("-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"),
)


class Level(NamedTuple):
    """What a processor must have to run a library, as the compiler's flags."""

    name: str
    flags: tuple[str, ...]


class Compiler(NamedTuple):
    """A command that compiles C++, what it says about its version, and flags that come behind the sources."""

    command: tuple[str, ...]
    version: str
    link_flags: tuple[str, ...] = ()


# Stated, because some distributions' compilers assume a newer processor.
_BASELINE = ("-march=x86-64",)
_AVX2 = (*_BASELINE, "-mavx2", "-mfma", "-mf16c")
_AVX_VNNI = (*_AVX2, "-mavxvnni")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_X86_LEVELS = {
    "portable": _BASELINE,
    "avx2": _AVX2,
    "avx_vnni": _AVX_VNNI,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
}


def levels_of(machine: str) -> list[Level]:
    """Return the levels to compile for a kind of machine, as `platform.machine()` names it."""
    flags = _X86_LEVELS if machine in ("x86_64", "amd64") else {"portable": ()}
    return [Level(name, flags[name]) for name in flags]


def find_compiler(chosen: str | None) -> Compiler | None:
    """Return the chosen compiler (a command, perhaps with arguments), or without a choice the first that answers."""
    for command in [shlex.split(chosen)] if chosen else [["g++"], ["clang++"], ["c++"]]:
        try:
            done = run([*command, "--version"])
        except OSError:
            continue
        if done.returncode == 0:
            return Compiler(tuple(command), done.stdout, tuple(shlex.split(os.environ.get("LDFLAGS", ""))))
    return None


def build(folder: Path, compiler: Compiler | None, levels: Sequence[Level]) -> list[Path]:
    """Bring the libraries in a folder up to date with the sources in it, and return them in the order of their levels.

    Libraries that these sources, this compiler and these flags did not make are removed, so whatever is there
    afterwards may be loaded. A level that the compiler refuses is left out.
    """
    if compiler is None:
        say("no working C++ compiler (CXX, else g++, clang++, c++): no kernels are built, Quire computes with torch")
        return replace_libraries(folder, [])
    record, digest = folder / RECORD, digest_of(folder, compiler, levels)
    if record.exists():
        (recorded, *names), _ = read_record(record)
        libraries = [folder / name for name in names]
        if recorded == digest and all(library.exists() for library in libraries):
            return libraries
    say(f"compiling {', '.join(level.name for level in levels)} with {shlex.join(compiler.command)}")
    # In the same folder, so that a finished library takes its place in one move: a running process keeps the old one.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        built, messages = compile_levels(folder, compiler, levels, Path(scratch))
        libraries = replace_libraries(folder, built)
    if libraries:  # nothing built is no result to keep: the next build tries again
        lines = [digest, *(library.name for library in libraries), "", messages]
        record.write_text("\n".join(lines), encoding="utf-8")
    return libraries


def read_record(record: Path) -> tuple[list[str], str]:
    """Read what a build recorded: the digest and the names of its libraries, and the compiler's messages."""
    head, _, messages = record.read_text(encoding="utf-8").partition("\n\n")
    return head.split(), messages


def digest_of(folder: Path, compiler: Compiler, levels: Sequence[Level]) -> str:
    """Return a digest of all that decides what the libraries contain."""
    sources = [(path.name, path.read_bytes()) for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])]
    return hashlib.sha256(repr((sources, FLAGS, levels, compiler)).encode()).hexdigest()


def compile_levels(folder: Path, compiler: Compiler, levels: Sequence[Level], target: Path) -> tuple[list[Path], str]:
    """Compile all sources of a folder for each level, side by side; return the libraries, and the compiler's messages.

    The messages, and the levels that the compiler refuses, are printed too.
    """
    sources = [str(path) for path in sorted(folder.glob("*.cpp"))]
    libraries = [target / f"libquire_{level.name}.so" for level in levels]
    commands = [
        [
            *(*compiler.command, *FLAGS, *level.flags, f'-DQUIRE_LEVEL="{level.name}"', *sources),
            *("-o", str(library), *compiler.link_flags),
        ]
        for level, library in zip(levels, libraries, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(run, commands))
    is_built = [done.returncode == 0 and library.exists() for library, done in zip(libraries, results, strict=True)]
    refused = [level.name for level, ok in zip(levels, is_built, strict=True) if not ok]
    if refused:
        say(f"left out, because the compiler refuses them: {', '.join(refused)}")
    messages = "".join(dict.fromkeys(done.stderr for done in results))  # most levels have the same
    sys.stderr.write(messages)
    return [library for library, ok in zip(libraries, is_built, strict=True) if ok], messages


def replace_libraries(folder: Path, built: Sequence[Path]) -> list[Path]:
    """Move what was built to its place in the folder, and remove every other library."""
    # First, so that a build that is interrupted here is done again.
    (folder / RECORD).unlink(missing_ok=True)
    libraries = [library.replace(folder / library.name) for library in built]
    for library in set(folder.glob("libquire_*.so")).difference(libraries):
        library.unlink()
    return libraries


def wheel_platform() -> str:
    """Return the tag of the platform that a wheel is made for: `PLATFORM_VARIABLE`, or this machine's."""
    # A Python for two kinds of processor (macOS) does not make libraries for both.
    here = sysconfig.get_platform().replace("universal2", platform.machine())
    return os.environ.get(PLATFORM_VARIABLE) or here.replace("-", "_").replace(".", "_")


def target_machine() -> str:
    """Return the kind of processor that libraries are made for, as `platform.machine()` names it."""
    stated = re.fullmatch(r"\w+?_\d+_\d+_(\w+)", os.environ.get(PLATFORM_VARIABLE, ""))
    return platform.machine() if stated is None else stated[1]


def build_package(root: Path) -> list[Path]:
    """Build the libraries of the package under `root`, with the compiler that CXX may name."""
    if os.name == "nt":
        say("no kernels are built on Windows, Quire computes with torch")
        return []
    return build(root / FOLDER, find_compiler(os.environ.get("CXX")), levels_of(target_machine()))


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command quietly."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def say(message: str) -> None:
    """Print one line about the build."""
    print(f"native: {message}", flush=True)


def get_build_hook() -> type:
    """Return the hook's class; hatchling asks for it by this name, and hatchling is needed only here."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class NativeKernels(BuildHookInterface[Any]):
        """Builds the libraries before the wheel that holds them."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 (hatchling's signature)
            """Build, and tag a wheel with libraries for this platform and any Python: nothing in them links to it."""
            libraries = build_package(Path(self.root))
            if libraries:
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{wheel_platform()}"
                # They are ignored by git, and so would be left out.
                build_data["artifacts"] += [f"/{library.relative_to(self.root).as_posix()}" for library in libraries]

    return NativeKernels


if __name__ == "__main__":
    build_package(Path(__file__).resolve().parent)
