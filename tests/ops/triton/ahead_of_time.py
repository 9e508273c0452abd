"""Kernels compiled for a GPU that is not there, and what the assembler says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402 - it needs Triton
from triton.compiler import ASTSource  # noqa: E402

from quire.ops.triton.kernels import (  # noqa: E402
    adapters,
    attention,
    delta_chunks,
    experts,
    few_rows,
    filtered_sampling,
    heads,
    linear,
    rows,
    sampling,
    shared_attention,
    state_chunks,
    states,
    stored_experts,
)

MODULES: tuple[ModuleType, ...] = (adapters, attention, delta_chunks, experts, few_rows, filtered_sampling, heads)
MODULES += (linear, rows, sampling, shared_attention, state_chunks, states, stored_experts)
# Bytes of shared memory that a program may have, by compute capability.
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# Options of launches, which are no parameters of kernels.
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Launch(NamedTuple):
    """A launch as Triton would specialise it.

    Args:
        kernel: kernel.
        arguments: arguments by name.
        options: number of warps and of pipeline stages, and whether it may overlap with the kernel before.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


class Compiled(NamedTuple):
    """A compiled kernel.

    Args:
        registers: number of registers of a thread.
        spilled: bytes of registers that a thread spills.
        shared: bytes of shared memory of a program.
        assembly: machine code, as text.
    """

    registers: int
    spilled: int
    shared: int
    assembly: str


class LaunchRecorder:
    """Stands in for a kernel, and keeps its launches in place of making them."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)

        def record(*args: Any, **kwargs: Any) -> None:
            options: dict[str, int] = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            arguments = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
            assert list(arguments) == list(self._kernel.arg_names)
            self._launches.append(Launch(self._kernel, arguments, options))

        return record


@contextmanager
def recorded(launches: list[Launch]) -> Iterator[None]:
    """Record what is launched by a backend; the results are whatever is in the memory."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for name, kernel in vars(module).items():
                if isinstance(kernel, triton.JITFunction) and kernel.__module__ == module.__name__:
                    patch.setattr(module, name, LaunchRecorder(kernel, launches))
        yield


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile a launch for a compute capability, 90 for sm_90."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        if (
            parameter.is_constexpr
            or value is None
            or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize)
        ):
            signature[parameter.name], constants[place,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name], number = TYPES[value.dtype], value.data_ptr()
        else:
            signature[parameter.name], number = ("fp32", 1) if isinstance(value, float) else ("i32", value)
        if number % 16 == 0 and not parameter.do_not_specialize:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", str(file))
        assembly = _run("cuobjdump", "-sass", str(file))
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK"))
    return Compiled(registers, stack, compiled.metadata.shared, assembly)


def _run(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout
