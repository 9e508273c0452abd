"""Small sources in the place of the kernels, which take minutes to compile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import hatch_build
from hatch_build import Compiler, find_compiler

ROOT = Path(__file__).resolve().parents[2]

# Says which level it was compiled for, and which instructions the compiler was allowed to use.
SOURCE = """
#include "number.h"
extern "C" __attribute__((visibility("default"))) const char* level() { return QUIRE_LEVEL; }
extern "C" __attribute__((visibility("default"))) int number() { return NUMBER; }
extern "C" __attribute__((visibility("default"))) const char* features() {
  return ""
#ifdef __SSE4_2__
    " sse4.2"
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    " avx2"
#endif
#if defined(__AVXVNNI__)
    " avx_vnni"
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
    " avx512"
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
    " avx512_bf16"
#endif
#ifdef __FAST_MATH__
    " fast_math"
#endif
    ;
}
"""


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    """The compiler of this machine; without one there is nothing to test."""
    found = find_compiler(os.environ.get("CXX"))
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with small sources."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "kernels.cpp").write_text(SOURCE, encoding="utf-8")
    (sources / "number.h").write_text("#define NUMBER 1\n", encoding="utf-8")
    return sources


@pytest.fixture
def tree(folder: Path, tmp_path: Path) -> Path:
    """A copy of what a build of the package reads, with small sources in the place of the kernels."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ["hatch_build.py", "pyproject.toml", ".gitignore", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, tree / name)
    (tree / hatch_build.FOLDER).parent.mkdir(parents=True)
    shutil.copytree(folder, tree / hatch_build.FOLDER)
    (tree / "src" / "quire" / "__init__.py").write_text("", encoding="utf-8")
    return tree
