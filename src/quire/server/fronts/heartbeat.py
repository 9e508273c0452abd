"""Silence of the process at the other end of a channel: one end pings, the other one answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

# Interval of pings, in seconds.
PING_INTERVAL_S: Final = 1.0
# A front that is silent for so long and takes no processor time is replaced; an engine's process that is silent for so
# long is called stuck.
HUNG_AFTER_S: Final = 10.0
# A front that works is replaced after a longer silence: a crowd of clients on a busy machine may take it many seconds.
BUSY_HUNG_AFTER_S: Final = 120.0


def processor_time_s(process: int) -> float | None:
    """Return the processor time that a process has taken, in seconds; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


class Silence:
    """Seconds of silence, as far as this process ran itself.

    Where all processes of a server are stopped together (a debugger, a machine that sleeps), each of them finds that
    the others were silent for long. So time between two calls of `tick` counts as two intervals at most.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked_s = clock()
        self.seconds = 0.0

    def end(self) -> None:
        """Note that the other process was heard."""
        self.seconds = 0.0

    def tick(self) -> float:
        """Count the time since the last call, and return the seconds of silence; called every `PING_INTERVAL_S`."""
        now_s = self._clock()
        self.seconds += min(now_s - self._ticked_s, 2 * PING_INTERVAL_S)
        self._ticked_s = now_s
        return self.seconds
