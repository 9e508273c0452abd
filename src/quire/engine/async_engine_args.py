"""An engine's options in a class with vLLM's name."""

from __future__ import annotations

from typing import Any


class AsyncEngineArgs:
    """Options of an engine under vLLM's name.

    Args:
        options: options of `LLM(...)`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
