"""Interception of launches of interpreted kernels, for tapes that replay them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter


@contextmanager
def seen_launches(see: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Pass each launch that is made in this context to a function, as a callable that makes the launch.

    Args:
        see: function that gets a launch with its kernel, grid and arguments bound; it must call the launch.
    """
    run = interpreter.InterpretedFunction.run

    def seen(kernel: Any, *args: Any, **kwargs: Any) -> None:
        see(lambda: run(kernel, *args, **kwargs))

    interpreter.InterpretedFunction.run = seen
    try:
        yield
    finally:
        interpreter.InterpretedFunction.run = run
