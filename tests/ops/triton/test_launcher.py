"""Launches that Triton is spared are those that it would make.

Kernels are compiled for a GPU that is not there, and their launches are kept in place of being made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, product
from typing import Any, NamedTuple

import pytest
import torch

from tests.ops.triton.ahead_of_time import Launch, triton
from tests.ops.triton.test_ahead_of_time import QWEN, attention_launches, other_launches

import triton.language as tl  # isort: skip - the modules above skip where Triton is missing
from triton.backends.compiler import GPUTarget  # isort: skip

from quire.ops.triton import launcher  # isort: skip
from quire.ops.triton.launcher import Kernel, kernel  # isort: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set"),
    # Triton 3.9 says that a later one will no longer join products and sums by itself.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]


class Made(NamedTuple):
    """A launch as the driver sees it; tensors are addresses, unless the launch is Triton's.

    Args:
        grid: numbers of programs.
        stream: stream.
        function: handle of the compiled kernel.
        hooks: hooks that are called.
        arguments: values of all parameters.
    """

    grid: tuple[int, int, int]
    stream: int
    function: int
    hooks: tuple[Any, Any]
    arguments: list[Any]

    @property
    def is_spared(self) -> bool:
        """True where Triton was not asked."""
        return not any(isinstance(argument, torch.Tensor) for argument in self.arguments)

    @property
    def work(self) -> tuple[Any, ...]:
        """All that a GPU would see."""
        addresses = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in self.arguments]
        return self.grid, self.stream, self.function, addresses


class KeepingDriver:
    """A driver for sm_90 that keeps launches. Compiled kernels get handles of their own."""

    def __init__(self) -> None:
        self.device = 0
        self.made: list[Made] = []
        self.kernels: list[Kernel] = []
        self.utils = self
        self._handles = count(1)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *_compiled: Any) -> tuple[int, int, int, int, int]:
        handle = next(self._handles)
        return handle, handle, 0, 0, 1024

    def launcher_cls(self, _source: Any, _metadata: Any) -> Any:
        def launch(*args: Any) -> None:
            self.made.append(Made(args[:3], args[3], args[4], args[7:9], list(args[9:])))

        return launch

    def fresh(self, function: Any, do_not_specialize: Sequence[str]) -> Kernel:
        """Return a kernel of which nothing is compiled yet."""
        self.kernels.append(kernel(do_not_specialize=do_not_specialize)(function))
        return self.kernels[-1]

    def forget(self) -> None:
        """Unload the compiled kernels, so that Triton does not ask another driver to."""
        for each in self.kernels:
            for compiled, *_ in each.device_caches.values():
                for variant in compiled.values():
                    variant.module = None


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeepingDriver]:
    keeping = KeepingDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", keeping)
    yield keeping
    keeping.forget()


def copy(output, x, size, stride, scale, BLOCK: tl.constexpr, DOUBLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy scaled values: a kernel with arguments of all kinds."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at * stride, mask=at < size, other=0.0) * scale
    if DOUBLE:
        values *= 2
    tl.store(output + at, values, mask=at < size)


def launch_thrice(driver: KeepingDriver, kernel: Kernel, grid: tuple[int, ...], args: Any, constants: Any) -> Made:
    """Launch as the backend does, and as Triton does; both do the same work. Return the last launch of the backend."""
    driver.made.clear()
    kernel[grid](*args, **constants)
    kernel[grid](*args, **constants)
    triton.JITFunction.run(kernel, *args, grid=grid, warmup=False, **constants)
    first, second, expected = driver.made
    assert first.work == second.work == expected.work
    return second


def test_variants_are_those_of_triton(driver: KeepingDriver) -> None:
    """Whatever was launched before, the variant is the one that Triton takes for these arguments."""
    used = driver.fresh(copy, ["size"])
    memory = torch.zeros(4096, dtype=torch.uint8)
    addresses = [memory[offset:].data_ptr() % 16 for offset in (0, 4)]
    assert addresses == [0, 4]
    tensors = [memory[offset : offset + 64].view(dtype) for offset in (0, 4) for dtype in (torch.float32, torch.int32)]
    mixes = [(tensors[0], each, 64, 1, 1.0) for each in tensors]
    mixes += [(tensors[2], tensors[0], *numbers, 2.0) for numbers in product((1, 17, 48), (0, 1, 2, 16, 17))]
    mixes += [(tensors[0], tensors[0], 5, number, 1.0) for number in (-16, -1, 2**31, 2**31 + 1, 2**31 - 1, 2**63)]
    mixes += [(tensors[0], tensors[0], 5, *pair) for pair in ((True, 1.0), (1, 1), (2, True), (1, 1.0))]
    handles = set()
    for repeat in range(2):
        for idx, mix in enumerate(mixes if repeat else mixes[::-1]):
            made = launch_thrice(driver, used, (3, 2), mix, {"BLOCK": 64, "DOUBLE": idx % 2 == 0, "num_warps": 4})
            handles.add(made.function)
            numbers = [each for each in mix if not isinstance(each, torch.Tensor)]
            is_known = all(type(each) is float or (type(each) is int and 0 <= each < 2**31) for each in numbers)
            assert made.is_spared == is_known
    assert len(handles) > 12


def test_constants_and_devices_have_variants_of_their_own(driver: KeepingDriver) -> None:
    used = driver.fresh(copy, ["size"])
    args = torch.zeros(64), torch.zeros(64), 64, 1, 1.0
    handles = set()
    for _ in range(2):
        for driver.device in (0, 1):
            for warps, block, double in product((1, 2), (32, 64), (False, True)):
                constants = {"BLOCK": block, "DOUBLE": double, "num_warps": warps}
                made = launch_thrice(driver, used, (1,), args, constants)
                assert made.is_spared
                assert made.stream == 100 + driver.device
                handles.add(made.function)
                # By other names, in another order.
                reordered = dict(reversed(constants.items()))
                assert launch_thrice(driver, used, (1,), args, reordered).function == made.function
    assert len(handles) == 16
    # The same values of other names.
    for constants in ({"BLOCK": 32, "num_warps": 4, "DOUBLE": True}, {"num_warps": 32, "BLOCK": 4, "DOUBLE": True}):
        handles.add(launch_thrice(driver, used, (1,), args, constants).function)
    assert len(handles) == 18


def test_constants_by_place_and_arguments_by_name_are_left_to_triton(driver: KeepingDriver) -> None:
    used = driver.fresh(copy, ["size"])
    args = torch.zeros(64), torch.zeros(64), 64, 1
    functions = set()
    for block in (32, 64):
        made = launch_thrice(driver, used, (1,), (*args, 1.0, block), {"DOUBLE": False})
        assert not made.is_spared
        functions.add(made.function)
    assert len(functions) == 2
    assert not launch_thrice(driver, used, (1,), args, {"scale": 1.0, "BLOCK": 32, "DOUBLE": False}).is_spared


def arguments_of(launches: list[Launch]) -> Iterator[tuple[Kernel, list[Any], dict[str, Any]]]:
    """Yield kernels, arguments and constants of recorded launches."""
    for launch in launches:
        names = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
        args = [value for name, value in launch.arguments.items() if name not in names]
        yield launch.kernel, args, {name: launch.arguments[name] for name in names} | launch.options


def test_kernels_of_the_backend(driver: KeepingDriver) -> None:
    """What the backend launches for a model's shapes is launched without Triton from the second time on."""
    kernels: dict[str, Kernel] = {}
    for original, args, constants in arguments_of(attention_launches(QWEN, 90) + other_launches()):
        name = original.__name__
        if name not in kernels:  # the backend's own keeps nothing of this driver
            kernels[name] = driver.fresh(original.fn, original.do_not_specialize)
        assert launch_thrice(driver, kernels[name], (3, 1), args, constants).is_spared
    assert {"prepare_heads", "attend", "combine", "attend_shared", "rms_norm", "gate", "sigmoid_gate"} <= set(kernels)


def test_hooks_see_launches(driver: KeepingDriver) -> None:
    """While a profiler is there, launches are Triton's; without one nothing is called."""
    used = driver.fresh(copy, ["size"])
    args, constants = (torch.zeros(64), torch.zeros(64), 64, 1, 1.0), {"BLOCK": 64, "DOUBLE": False}
    assert launch_thrice(driver, used, (1,), args, constants).hooks == (None, None)
    for chain in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        chain.add(print)
        try:
            made = launch_thrice(driver, used, (1,), args, constants)
        finally:
            chain.remove(print)
        assert not made.is_spared
        assert chain in made.hooks
    for grid in ((7,), (7, 6), (7, 6, 5)):
        made = launch_thrice(driver, used, grid, args, constants)
        assert made.is_spared
        assert made.grid == (*grid, 1, 1)[:3]


def test_unknown_releases_are_left_to_triton(driver: KeepingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.IS_KNOWN
    monkeypatch.setattr(launcher, "IS_KNOWN", False)
    args = torch.zeros(64), torch.zeros(64), 64, 1, 1.0
    assert not launch_thrice(driver, driver.fresh(copy, ["size"]), (1,), args, {"BLOCK": 64, "DOUBLE": False}).is_spared
