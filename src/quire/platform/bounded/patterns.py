"""Matching of regular expressions of untrusted files in a process with limits, since some take exponential time."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from quire.platform.bounded.process import BoundedProcess, LimitExceeded

MATCH_TIMEOUT_S: Final = 10.0
MATCH_MEMORY_BYTES: Final = 256 << 20


def match_names(
    patterns: Iterable[str], names: Sequence[str], timeout_s: float = MATCH_TIMEOUT_S
) -> dict[str, frozenset[str]]:
    """Return the names that each pattern matches at their start, by pattern.

    Args:
        patterns: regular expressions in the syntax of Python.
        names: names to match.
        timeout_s: time limit of the first pattern, and of all others together, in seconds.

    Raises:
        ValueError: a pattern is invalid, or matching it exceeds a limit; the message names the pattern.
        WorkerError: the process does not start.
    """
    matches: dict[str, frozenset[str]] = {}
    unique = tuple(dict.fromkeys(patterns))
    if not unique:
        return matches
    process = BoundedProcess(f"{__name__}:matcher", json.dumps(names).encode(), MATCH_MEMORY_BYTES)
    deadline = math.inf
    try:
        for pattern in unique:
            left = min(timeout_s, deadline - time.monotonic())
            if left <= 0:
                raise LimitExceeded("time")
            answer = json.loads(process.ask(json.dumps(pattern).encode(), left))
            # The time starts with the first answer, since this waits until the process has started.
            deadline = min(deadline, time.monotonic() + timeout_s)
            if isinstance(answer, str):
                raise ValueError(f"{pattern[:80]!r} is not a valid regular expression: {answer}")
            matches[pattern] = frozenset(names[idx] for idx in answer)
    except LimitExceeded as error:
        raise ValueError(f"matching {pattern[:80]!r} exceeds the limit of {error.limit}") from error
    finally:
        process.close()
    return matches


def matcher(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the program of the process: its setup is the names, a question is a pattern."""
    names = json.loads(setup)

    def answer(question: bytes) -> bytes:
        result: list[int] | str
        try:
            matches = re.compile(json.loads(question)).match
            result = [idx for idx, name in enumerate(names) if matches(name)]
        except (re.error, RecursionError, OverflowError) as error:
            result = str(error) or type(error).__name__
        return json.dumps(result).encode()

    return answer
