"""The choice of a native library: built levels, the level asked for, and the errors without one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.ops import make_ops
from quire.ops.cpu import native_library
from quire.ops.cpu.native_library import FOLDER, MAX_LEVEL_VARIABLE, find_library, runnable_libraries
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.weight_formats import FORMS, WeightFormat
from quire.ops.pytorch.torch_ops import TorchOps
from tests.ops.backends import LIBRARIES

CPU = torch.device("cpu")
built = pytest.mark.skipif(not LIBRARIES, reason="no native kernels were built")


@built
def test_the_best_library_is_taken() -> None:
    for kernels in ("auto", "native"):
        ops = make_ops(CPU, kernels)
        assert isinstance(ops, NativeOps)
        assert ops.name == f"native ({list(LIBRARIES)[-1]})"
    assert isinstance(make_ops(CPU, "torch"), TorchOps)


@built
def test_a_level_that_was_not_built_is_passed_over(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "libquire_portable.so", tmp_path)
    found = find_library(tmp_path)
    assert not isinstance(found, str)
    assert found.level == "portable"


@built
@pytest.mark.parametrize("level", LIBRARIES)
def test_a_lower_level_is_taken_where_the_environment_says_so(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_LEVEL_VARIABLE, level)
    assert list(runnable_libraries()) == list(LIBRARIES)[: list(LIBRARIES).index(level) + 1]
    assert make_ops(CPU).name == f"native ({level})"


def test_a_level_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_LEVEL_VARIABLE, "sse9")
    with pytest.raises(ConfigError, match=r"QUIRE_MAX_CPU_LEVEL must be one of .*'avx2'.*got 'sse9'"):
        make_ops(CPU)


@built
def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(FOLDER / "libquire_portable.so", tmp_path)
    monkeypatch.setattr(native_library, "INTERFACE_VERSION", -1)
    assert "other sources" in str(find_library(tmp_path))


@built
@pytest.mark.parametrize("name", list(FORMS))
def test_kernels_that_multiply_rounded_weights_wrongly_are_left(
    name: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = find_library()
    assert not isinstance(library, str)
    kernels = library.rounded[name]
    library.rounded[name] = kernels._replace(quantized=kernels.quantized._replace(pack_rounded=lambda *_: True))
    monkeypatch.setattr("quire.ops.find_library", lambda: library)
    ops = make_ops(CPU, quantization="int4")
    assert isinstance(ops, TorchOps)
    assert "other products of rounded weights" in ops.name
    with pytest.raises(ConfigError, match="other products of rounded weights"):
        make_ops(CPU, "native", "int4")
    assert isinstance(make_ops(CPU), NativeOps)


def test_without_libraries_torch_computes_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.find_library", lambda: find_library(tmp_path))
    ops = make_ops(CPU)
    assert isinstance(ops, TorchOps)
    assert "none were built" in ops.name
    with pytest.raises(ConfigError, match="none were built") as caught:
        make_ops(CPU, "native")
    assert caught.value.field == "kernels"


def test_a_broken_library_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "libquire_portable.so").write_bytes(b"\x7fELF, and no more")
    assert isinstance(find_library(tmp_path), str)


def test_native_kernels_are_for_cpus() -> None:
    with pytest.raises(ConfigError, match="for CPUs"):
        make_ops(torch.device("cuda"), "native")
    with pytest.raises(ConfigError, match="kernels"):
        EngineConfig.from_options(kernels="fast")
