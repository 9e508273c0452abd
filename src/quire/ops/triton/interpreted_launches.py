"""Launches of interpreted kernels, seen by whoever wants to make them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter


@contextmanager
def seen_launches(see: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Give each launch that is made in this context to a function, which makes it by calling what it is given.

    Args:
        see: function that is given a launch: its kernel, grid and arguments are those of the first time for ever.
    """
    run = interpreter.InterpretedFunction.run

    def seen(kernel: Any, *args: Any, **kwargs: Any) -> None:
        see(lambda: run(kernel, *args, **kwargs))

    interpreter.InterpretedFunction.run = seen
    try:
        yield
    finally:
        interpreter.InterpretedFunction.run = run
