"""Kernels that were compiled for aarch64 compute what torch computes, under emulation where there is a compiler.

The same calls run on this machine first, by its own library and its own compiler.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hatch_build import Compiler, compile_levels, find_compiler, levels_of
from quire.ops.cpu.native_library import ACTIVATIONS, FOLDER, TYPES
from quire.ops.interface.weight_formats import FORMS, WeightFormat

pytestmark = pytest.mark.slow
HERE = platform.machine()
COMMANDS = Path(__file__).with_name("kernel_calls.cpp")
ALIGNMENT = 64
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")
ROWS = (1, 2, 3, 7, 16, 33)
INT8_FORMS: dict[WeightFormat, int] = {"int8": 15, "int8 of 16": 24}  # their numbers in grouped_form.h


class Machine(NamedTuple):
    """How kernels of a machine are run.

    Args:
        command: command that runs a program of that machine.
        program: the program that calls kernels.
        library: the library with them.
    """

    command: tuple[str, ...]
    program: Path
    library: Path


class Memory:
    """The memory of the calls of a machine's kernels.

    Args:
        machine: the machine.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._content = bytearray()

    def put(self, tensor: Tensor) -> str:
        """Add the values of a tensor, and return the argument for their address."""
        return self.room(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    def room(self, content: bytes) -> str:
        """Add bytes, and return the argument for their address."""
        self._content += bytes(-len(self._content) % ALIGNMENT)
        place = f"p{len(self._content)}"
        self._content += content
        return place

    def run(self, *calls: Sequence[str | int | float]) -> None:
        """Call functions in turn: their names, and arguments that are addresses, integers or a float."""
        arguments: list[str] = []
        for name, *given in calls:
            numbers = [each if isinstance(each, str) else f"{'if'[isinstance(each, float)]}{each}" for each in given]
            arguments += [*(["--"] if arguments else []), str(name), *numbers]
        machine = self._machine
        command = [*machine.command, str(machine.program), str(machine.library), *arguments]
        done = subprocess.run(command, input=bytes(self._content), capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        self._content[:] = done.stdout

    def read(self, place: str, like: Tensor) -> Tensor:
        """Return the values at an address, of the shape and dtype of a tensor."""
        start = int(place[1:])
        return torch.frombuffer(self._content[start : start + like.nbytes], dtype=like.dtype).view(like.shape)


@pytest.fixture(scope="module", params=[HERE, "aarch64"] if HERE != "aarch64" else [HERE])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Return this machine, and an emulated one whose kernels are compiled for it here."""
    folder = tmp_path_factory.mktemp(request.param)
    command: tuple[str, ...] = ()
    if request.param == HERE:
        compiler, library = find_compiler(None), FOLDER / "libquire_portable.so"
        if compiler is None or not library.exists():
            pytest.skip("no kernels, or no compiler")
    else:
        compiler, command = Compiler((CROSS_COMPILER,), ""), EMULATOR
        if shutil.which(CROSS_COMPILER) is None or shutil.which(EMULATOR[0]) is None:
            pytest.skip("no cross-compiler for aarch64, or no emulator")
        (library,), messages = compile_levels(FOLDER, compiler, levels_of(request.param), folder)
        assert not messages
    program = folder / "kernel_calls"
    subprocess.run([*compiler.command, "-O1", str(COMMANDS), "-o", str(program), "-ldl"], check=True)
    return Machine(command, program, library)


def values(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_two_bytes(machine: Machine, dtype: torch.dtype, is_gated: bool) -> None:
    if dtype is torch.float16 and HERE == "x86_64" and not machine.command:
        pytest.skip("the portable level of x86-64 does not pack float16")
    width, columns = 96, 256 if is_gated else 130
    weight, bias = values(columns, width, dtype=dtype, scale=0.1), values(columns, dtype=dtype, seed=1)
    for num_rows in ROWS:
        x, residual = (values(num_rows, size, dtype=dtype, seed=2) for size in (width, columns))
        expected = functional.linear(x.float(), weight.float(), bias.float()) + residual.float()
        memory, type_id = Memory(machine), TYPES[dtype]
        output = torch.empty(num_rows, columns // (1 + is_gated), dtype=dtype)
        packed, place = memory.room(bytes(320 * width * 2)), memory.put(output)
        activation = ACTIVATIONS["silu" if is_gated else None]
        addends = memory.put(bias), memory.put(residual)
        memory.run(
            ("quire_pack", type_id, memory.put(weight), columns, width, int(is_gated), packed),
            (
                "quire_linear",
                type_id,
                memory.put(x),
                width,
                num_rows,
                packed,
                columns,
                width,
                *addends,
                activation,
                place,
            ),
        )
        expected = gated(expected.to(dtype).float()) if is_gated else expected
        torch.testing.assert_close(memory.read(place, output).float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", INT8_FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_int8(machine: Machine, dtype: torch.dtype, name: WeightFormat) -> None:
    width, columns = 128, 130
    weight = values(columns, width, dtype=dtype, scale=0.1)
    for num_rows in ROWS:
        x = values(num_rows, width, dtype=dtype, seed=2)
        memory, type_id, output = Memory(machine), TYPES[dtype], torch.empty(num_rows, columns, dtype=dtype)
        panels, place = memory.room(bytes(4 * 192 * width)), memory.put(output)
        # `QuantizedWeight` of the sources: number and address of segments, number of slices; then the only segment.
        table = memory.room(bytes(8 * 8))
        number = INT8_FORMS[name]
        segment: tuple[str | int, ...] = (number, columns, FORMS[name].offset, 0, panels)
        fields = (1, f"p{int(table[1:]) + 24}", 4, *segment)
        memory.run(
            *(("store", f"p{int(table[1:]) + 8 * idx}", field) for idx, field in enumerate(fields)),
            ("quire_pack_rounded", number, type_id, memory.put(weight), columns, width, 0, panels),
            ("quire_linear_quantized", type_id, memory.put(x), width, num_rows, table, columns, width, 0, 0, 0, place),
        )
        expected = functional.linear(x.float(), weight.float())
        error = (memory.read(place, output).float() - expected).std() / expected.std()
        assert 0 < error < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_and_gates(machine: Machine, dtype: torch.dtype) -> None:
    width, type_id, memory = 100, TYPES[dtype], Memory(machine)
    x, weight = values(7, 2 * width, dtype=dtype), values(2 * width, dtype=dtype, seed=1)
    places = memory.put(x), memory.put(torch.empty_like(x)), memory.put(torch.empty(7, width, dtype=dtype))
    memory.run(
        ("quire_rms_norm", type_id, places[0], 2 * width, type_id, memory.put(weight), 1e-5, 7, 2 * width, places[1]),
        ("quire_gate", type_id, ACTIVATIONS["silu"], places[0], 7, width, places[2]),
    )
    normed = functional.rms_norm(x.float(), (2 * width,), weight.float(), 1e-5)
    limit = 2 * torch.finfo(dtype).eps if dtype is not torch.float32 else 1e-5
    torch.testing.assert_close(memory.read(places[1], x).float(), normed, rtol=limit, atol=limit)
    found = memory.read(places[2], torch.empty(7, width, dtype=dtype)).float()
    torch.testing.assert_close(found, gated(x.float()), rtol=limit, atol=limit)
