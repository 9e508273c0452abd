"""Type declarations of functions in compiled libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def typed(function: Any, *types: Any, returns: Any = None) -> Callable[..., Any]:
    """Declare the types of a function's arguments and of its result for ctypes; None stands for no result."""
    function.argtypes, function.restype = types, returns
    checked: Callable[..., Any] = function
    return checked
