"""The signals that stop a server or a router: the first one lets requests finish, the second one ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Final

# Not on Windows.
HANGUP: Final = getattr(signal, "SIGHUP", None)


def take_signals(handle: Callable[[int], None]) -> None:
    """Handle the signals that end the process on the running event loop.

    `loop.add_signal_handler` would lose a signal while the loop is busy: signals and calls from other threads share one
    pipe, which may be full. Signals after the loop's end are ignored: the engine may be saving its cache.
    """
    loop = asyncio.get_running_loop()

    def on_signal(number: int, _: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(handle, number)

    for number in filter(None, (signal.SIGINT, signal.SIGTERM, HANGUP)):
        # A process that was started with nohup outlives its terminal.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)


def end_at_once(number: int) -> None:
    """End the process by a second signal, other than that of a closing terminal, which may come twice."""
    if number != HANGUP:
        os._exit(128 + number)
