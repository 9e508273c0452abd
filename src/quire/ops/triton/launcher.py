"""A launcher of Triton kernels with little host overhead per launch.

For each launch, Triton specialises the arguments, looks up the compiled variant and reads its environment variables,
which takes 9 to 25 us on a Zen 3. A `Kernel` leaves only the first launch of each specialisation to Triton, caches the
compiled variant, and launches it directly from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

# Releases of Triton whose compiled kernels can be launched directly; with other releases Triton makes every launch.
FIRST_KNOWN: Final = (3, 6)
FIRST_UNKNOWN: Final = (3, 10)
IS_KNOWN: Final = FIRST_KNOWN <= tuple(map(int, triton.__version__.split(".")[:2])) < FIRST_UNKNOWN

# Properties of arguments that Triton specialises on; none is the name of a parameter.
UNALIGNED: Final = "&15"  # follows the dtype of a tensor that is not aligned to 16 bytes
ONE: Final = "=1"
MULTIPLE: Final = "%16"
OTHER: Final = "i32"
# Integers from this one on do not fit into int32.
INT32_END: Final = 1 << 31


class Variant(NamedTuple):
    """A compiled kernel, ready to be launched.

    Args:
        run: launcher of its signature.
        function: its function handle (CUfunction).
        metadata: Triton's packed metadata: number of warps, bytes of shared memory and so on.
        constants: values of the constexprs, in the order of the parameters; they follow the arguments.
    """

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]


def describe(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
    """Return the properties of arguments that a variant is specialised on, and the values that its launcher takes.

    A tensor is passed as its address. None if an argument is neither a tensor, nor a float, nor an int from 0 to
    INT32_END - 1: such launches are left to Triton.
    """
    facts: list[Any] = []
    values: list[Any] = []
    add_fact, add_value = facts.append, values.append
    for arg in args:
        kind = type(arg)
        if kind is Tensor:
            address = arg.data_ptr()
            add_fact(arg.dtype)
            if address & 15:
                add_fact(UNALIGNED)
            add_value(address)
        elif kind is int and 0 <= arg < INT32_END:
            add_fact(ONE if arg == 1 else OTHER if arg & 15 else MULTIPLE)
            add_value(arg)
        elif kind is float:
            add_fact(kind)
            add_value(arg)
        else:
            return None
    return facts, values


class Kernel(triton.JITFunction):  # type: ignore[misc]
    """A compiled kernel of this backend: `kernel[grid](*arguments, **constants)`, as with Triton.

    Variants are cached by device, dtypes and alignments of tensors, ints that are 1 or multiples of 16, and all
    constexprs and options such as `num_warps`. The launch is on the current stream. Triton makes the launch while a
    profiler has launch hooks, and if constexprs are positional or arguments are passed by name. Only at the first
    launch of a variant, Triton checks whether the device can read the tensors.
    """

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        super().__init__(fn, **options)
        self._variants: dict[tuple[Any, ...], Variant] = {}
        are_constants = [parameter.is_constexpr for parameter in self.params]
        assert are_constants == sorted(are_constants), "constants come behind arguments"
        self._num_args = are_constants.count(False)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        described = describe(args) if len(args) == self._num_args else None
        if described is None or self._is_watched():
            self.run(*args, grid=grid, warmup=False, **constants)
            return
        facts, values = described
        active = driver.active
        device = active.get_current_device()
        key = (device, *facts, *constants, *constants.values())
        variant = self._variants.get(key)
        if variant is None:
            self._keep(key, self.run(*args, grid=grid, warmup=False, **constants), constants)
            return
        run, function, metadata, constant_values = variant
        stream = active.get_current_stream(device)
        run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *values, *constant_values)

    def _is_watched(self) -> bool:
        """Return whether launch hooks are set, such as a profiler's."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or self.pre_run_hooks)

    def _keep(self, key: tuple[Any, ...], compiled: Any, constants: dict[str, Any]) -> None:
        """Cache a variant that Triton has launched, if this release of Triton is known and all constexprs are named."""
        names = self.arg_names[self._num_args :]
        if IS_KNOWN and compiled is not None and all(name in constants for name in names):
            constant_values = tuple(constants[name] for name in names)
            self._variants[key] = Variant(compiled.run, compiled.function, compiled.packed_metadata, constant_values)


def kernel(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a kernel that the host launches: `triton.jit` if interpreted, else a `Kernel`."""
    if fn is None:
        return partial(kernel, **options)
    return triton.jit(fn, **options) if knobs.runtime.interpret else Kernel(fn, **options)
