"""A CPU stand-in for CUDA graphs: a tape of operators and kernel launches, which replays exactly the captured calls.

Like a graph, it fixes the address of every tensor, the grid of every launch and every host value, and does not run the
Python code again. So a value that the code reads from the host at each step, and not from static memory, is the
same as at capture, and gives wrong results. Code that cannot be captured on a GPU fails here too, as far as operators
show it: synchronisation, data-dependent shapes, and tensors made of host values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from quire.execution.capture.step_capture import CapturedCall

# Context in which each kernel launch is passed to a function; see `seen_launches`.
SeenLaunches = Callable[[Callable[[Callable[[], None]], None]], AbstractContextManager[None]]

# Operators that synchronise: they return a value to the host, or need one for their output shape.
WAITING: Final = frozenset(
    {
        "_local_scalar_dense",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "_unique2",
        "_assert_async",
    }
)
# Operators that return uninitialised memory.
UNWRITTEN: Final = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# Operators that copy host values to the device.
FROM_HOST: Final = frozenset({"lift_fresh", "lift_fresh_copy", "lift", "pin_memory", "_pin_memory"})


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators, and appends their replays to the last tape."""

    def __init__(self, tapes: list[list[Callable[[], None]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tapes = tapes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in WAITING or _is_by_mask(name, args):
            raise RuntimeError(f"a captured call waits for the device ({func})")
        if name in FROM_HOST:
            raise RuntimeError(f"a captured call takes numbers of the host ({func})")
        results = func(*args, **kwargs)
        self._tapes[-1].extend(_again(func, args, kwargs, results))
        return results


def _is_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether an operator indexes by a mask, which makes its shape data-dependent."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> list[Callable[[], None]]:
    """Return the replay of an operator; none for a view, or for uninitialised memory."""
    given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    kept = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    is_own = [leaf.untyped_storage().data_ptr() not in given for leaf in kept]
    changes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
    if func.overloadpacket.__name__ in UNWRITTEN or (not changes and not any(is_own)):
        return []

    def again() -> None:
        found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for target, source, owns in zip(kept, found, is_own, strict=True):
            if owns:
                target.copy_(source)

    return [again]


class TapeCapture:
    """Captures calls on a CPU."""

    def __init__(self, seen_launches: SeenLaunches) -> None:
        self._seen_launches = seen_launches

    def capture(self, run: Callable[[], object]) -> CapturedCall:
        """Record the call."""
        return self.capture_pieces(lambda _: run())[0]

    def capture_pieces(self, run: Callable[[Callable[[], None]], object]) -> list[CapturedCall]:
        """Record the call, on a tape for each piece."""
        run(lambda: None)
        tapes: list[list[Callable[[], None]]] = [[]]

        def see(launch: Callable[[], None]) -> None:
            with _disable_current_modes():
                launch()
            tapes[-1].append(launch)

        with self._seen_launches(see), _Recording(tapes):
            run(lambda: tapes.append([]))
        return [CapturedCall(partial(_replay, tape)) for tape in tapes]


def _replay(tape: list[Callable[[], None]]) -> None:
    for again in tape:
        again()
