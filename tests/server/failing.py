"""`quire` with faults in the server itself, which no request can cause."""

from __future__ import annotations

import asyncio
import os
import sys

from quire.cli.main import main
from quire.server.http import http_server
from quire.server.http.connection import Connections

# Set to one of these in the environment.
FAULT = "QUIRE_TEST_FAULT"
WATCH_FAILS, SHORT_FLUSH = "watch fails", "short flush"


async def fail(_: Connections) -> None:
    """Fail, once requests may be there."""
    await asyncio.sleep(0.5)
    raise RuntimeError("injected")


if __name__ == "__main__":
    if os.environ[FAULT] == WATCH_FAILS:
        Connections.watch = fail  # type: ignore[method-assign, assignment]
    else:
        http_server.FLUSH_TIMEOUT_S = 1
    sys.exit(main())
