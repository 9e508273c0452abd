"""Waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until something is so, for a minute at most."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
