"""The number of operations that a call takes, which is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_operations(call: Callable[[], object]) -> int:
    """Return how many operations of Python's machine a call executes in this thread; compiled code counts nothing."""
    num = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return count

    known = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(known)
    return num
