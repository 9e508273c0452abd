"""The kernels of level `avx_vnni` on a processor that has their instructions in the encoding of AVX-512 only.

Where a processor has AVX-VNNI, the other tests run this level as every other. Elsewhere the assembler can encode the
compiler's own output for AVX-512, without a change of an instruction or a register.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hatch_build import FLAGS, FOLDER, find_compiler, levels_of
from tests.ops.backends import LIBRARIES
from tests.ops.world import randn

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("library", "linear_int8", "linear_grouped")


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
        assert "{vex} vpdpbusd" in assembly or text.stem == "library"
        text.write_text(assembly.replace("{vex} ", ""), encoding="utf-8")
    path = folder / "libquire.so"
    subprocess.run([*compiler.command, "-shared", *map(str, texts), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def multiply(library: Any, name: str, weight: Tensor, x: Tensor) -> Tensor:
    """Pack a weight in a format and multiply rows by it, in float32."""
    num_columns, width = map(ctypes.c_int64, weight.shape)
    pointer = ctypes.c_void_p
    num_bytes = library[f"quire_bytes_{name}"]
    num_bytes.restype = ctypes.c_int64
    packed = torch.zeros(num_bytes(num_columns, width), dtype=torch.uint8)
    library[f"quire_pack_{name}"](
        ctypes.c_int64(0), pointer(weight.data_ptr()), num_columns, width, False, pointer(packed.data_ptr())
    )
    output = torch.zeros(len(x), len(weight))
    rows = (pointer(x.data_ptr()), ctypes.c_int64(x.stride(0)), ctypes.c_int64(len(x)))
    product = library[f"quire_linear_{name}"]
    operands = (pointer(packed.data_ptr()), num_columns, width, None, None, ctypes.c_int64(0))
    product(ctypes.c_int64(0), *rows, *operands, pointer(output.data_ptr()))
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int6", "int4"])
@pytest.mark.parametrize(("width", "num_columns"), [(96, 7), (1120, 40)])
def test_numbers_are_those_of_avx2(library: ctypes.CDLL, name: str, width: int, num_columns: int) -> None:
    weight = randn(num_columns, width)
    avx2 = ctypes.CDLL(str(LIBRARIES["avx2"]))
    for num_rows in (*range(1, 14), 16, 17, 65, 97):
        x = randn(num_rows, width, seed=num_rows)
        assert torch.equal(multiply(library, name, weight, x), multiply(avx2, name, weight, x))
