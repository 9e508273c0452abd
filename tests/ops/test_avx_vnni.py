"""The kernels of level `avx_vnni` on a processor that has their instructions in the encoding of AVX-512 only.

Where a processor has AVX-VNNI, the other tests run this level as every other. Elsewhere the assembler can encode the
compiler's own output for AVX-512, without a change of an instruction or a register.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hatch_build import FLAGS, FOLDER, find_compiler, levels_of
from quire.ops.cpu.native_library import RoundedKernels, quantized_kernels
from quire.ops.cpu.native_linear import NativeLinear
from quire.ops.interface.weight_formats import FORMS, WeightFormat
from quire.ops.interface.weight_memory import WeightMemory
from tests.ops.backends import LIBRARIES
from tests.ops.world import randn

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("library", "round_weights", "linear_quantized")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The linear layers of rounded weights, compiled for AVX-VNNI and encoded for AVX-512."""
    if "avx512_bf16" not in LIBRARIES:
        pytest.skip("no VNNI of AVX-512 here")
    compiler = find_compiler(os.environ.get("CXX"))
    assert compiler is not None
    flags = next(level.flags for level in levels_of("x86_64") if level.name == "avx_vnni")
    folder = tmp_path_factory.mktemp("avx_vnni")
    texts = [folder / f"{name}.s" for name in SOURCES]
    for text in texts:
        source = ROOT / FOLDER / f"{text.stem}.cpp"
        command = [*compiler.command, *FLAGS, *flags, '-DQUIRE_LEVEL="avx_vnni"', "-S", str(source), "-o", str(text)]
        if subprocess.run([word for word in command if word != "-shared"], check=False).returncode != 0:
            pytest.skip("the compiler does not know AVX-VNNI")
        assembly = text.read_text(encoding="utf-8")
        assert ("{vex} vpdpbusd" in assembly) == (text.stem == "linear_quantized")
        text.write_text(assembly.replace("{vex} ", ""), encoding="utf-8")
    path = folder / "libquire.so"
    subprocess.run([*compiler.command, "-shared", *map(str, texts), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def multiply(library: ctypes.CDLL, name: WeightFormat, weight: Tensor, x: Tensor) -> Tensor:
    """Pack a weight in a format and multiply rows by it, in float32."""
    kernels = RoundedKernels(quantized_kernels(library, panel_columns=16), FORMS[name])
    return NativeLinear(kernels, WeightMemory(), weight, None)(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize(("width", "num_columns"), [(96, 7), (1120, 40)])
def test_numbers_are_those_of_avx2(library: ctypes.CDLL, name: WeightFormat, width: int, num_columns: int) -> None:
    weight = randn(num_columns, width)
    avx2 = ctypes.CDLL(str(LIBRARIES["avx2"]))
    for num_rows in (*range(1, 14), 16, 17, 65, 97):
        x = randn(num_rows, width, seed=num_rows)
        assert torch.equal(multiply(library, name, weight, x), multiply(avx2, name, weight, x))
