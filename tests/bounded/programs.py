"""Programs for bounded processes: they echo, run for ever, take memory, or fail."""

from __future__ import annotations

from collections.abc import Callable


def echo(setup: bytes) -> Callable[[bytes], bytes]:
    """Answer with the setup and the question; obey a few questions instead."""

    def answer(question: bytes) -> bytes:
        if question == b"loop":
            while True:
                pass
        if question == b"grow":
            return b"x" * (1 << 30)
        if question == b"recurse":
            return answer(b"recurse")
        if question == b"print":
            print("not an answer")
        return setup + question

    return answer


def broken(setup: bytes) -> Callable[[bytes], bytes]:
    """Fail before the first question."""
    raise ValueError(setup)
