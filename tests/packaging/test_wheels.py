"""Wheels for other machines: what they promise is read from the libraries in them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from hatch_build import Compiler, levels_of
from tools.build_wheels import COMPILERS, POLICY, BuildError, build_wheel, faults_of, unpack_sources

pytest.importorskip("hatchling", reason="hatchling is not installed")
ARM = pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="no cross-compiler for aarch64")
HERE = platform.machine()
linux = pytest.mark.skipif(HERE not in COMPILERS or shutil.which("readelf") is None, reason="builds on Linux")


@pytest.fixture
def sources(tree: Path, tmp_path: Path) -> Path:
    """The unpacked source distribution of the small tree."""
    folder = tmp_path / "sdist"
    folder.mkdir()
    return unpack_sources(tree, folder)


@linux
@pytest.mark.usefixtures("compiler")
def test_a_wheel_has_all_levels_and_a_tag_that_is_true(sources: Path, tmp_path: Path) -> None:
    wheel = build_wheel(sources, tmp_path, HERE, COMPILERS[HERE])
    assert wheel.name.endswith(f"-py3-none-{POLICY}_{HERE}.whl")
    with zipfile.ZipFile(wheel) as file:
        names = [Path(name).name for name in file.namelist() if name.endswith(".so")]
        (tags,) = (name for name in file.namelist() if name.endswith("dist-info/WHEEL"))
        assert f"Tag: py3-none-{POLICY}_{HERE}" in file.read(tags).decode()
    assert sorted(names) == sorted(f"libquire_{level.name}.so" for level in levels_of(HERE))


@linux
@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("refused", "fault"),
    [("portable", "has no kernels"), (levels_of(HERE)[-1].name, f"lacks libquire_{levels_of(HERE)[-1].name}.so")],
)
def test_a_wheel_without_a_level_is_removed(sources: Path, tmp_path: Path, refused: str, fault: str) -> None:
    compiler = tmp_path / "cxx"
    all_of_them = "*portable*|*avx*" if refused == "portable" else f'*"{refused}"*'
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *QUIRE_LEVEL=*) case "$*" in {all_of_them}) exit 1;; esac;; esac\n'
        f'exec {COMPILERS[HERE]} "$@"\n',
        encoding="utf-8",
    )
    compiler.chmod(0o755)
    with pytest.raises(BuildError, match=fault):
        build_wheel(sources, tmp_path, HERE, str(compiler))
    assert list(tmp_path.glob("*.whl")) == []


@linux
def test_symbols_that_are_too_new_are_named(compiler: Compiler, tmp_path: Path) -> None:
    versions = "".join(f"{name} {{}};\n" for name in ("GLIBC_2.28", "GLIBC_2.34", "GCC_12.0.0"))
    (tmp_path / "versions").write_text(versions, encoding="utf-8")
    source = "\n".join(
        f'extern "C" int f{idx}() {{ return {idx}; }} asm(".symver f{idx}, g{idx}@{version}");'
        for idx, version in enumerate(("GLIBC_2.28", "GLIBC_2.34", "GCC_12.0.0"))
    )
    library = tmp_path / "lib.so"
    command = [*compiler.command, "-shared", "-fPIC", "-nostdlib", "-xc++", "-", "-o", str(library)]
    command.append(f"-Wl,--version-script={tmp_path / 'versions'}")
    subprocess.run(command, input=source, text=True, check=True)
    assert faults_of(library, HERE) == ["needs GCC 12.0.0", "needs GLIBC 2.34"]
    assert "is for " in faults_of(library, "riscv64")[0]


@ARM
@linux
@pytest.mark.slow
def test_a_wheel_for_aarch64_is_cross_compiled(sources: Path, tmp_path: Path) -> None:
    wheel = build_wheel(sources, tmp_path, "aarch64", COMPILERS["aarch64"])
    assert wheel.name.endswith(f"{POLICY}_aarch64.whl")
    with zipfile.ZipFile(wheel) as file:
        assert [name for name in file.namelist() if name.endswith(".so")] == ["quire/ops/native/libquire_portable.so"]
