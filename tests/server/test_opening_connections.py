"""Connections that are accepted and not open yet."""

from __future__ import annotations

import asyncio
from functools import partial

import uvicorn
from uvicorn.server import ServerState

from quire.server.http.connection import Connection, Connections


def test_a_connection_counts_once_while_it_opens() -> None:
    """Counted as accepted and as open, four connections of a limit of four closed one that had sent nothing yet."""
    asyncio.run(open_connections())


async def open_connections() -> None:
    """Open a connection of two, and accept one that fails; a connection belongs to an event loop."""
    connections = Connections(2, 1.0, 1.0, 1.0)
    settings = uvicorn.Config(lambda: None)
    make = partial(Connection, connections, config=settings, server_state=ServerState(), app_state={})
    first, failed = make(), make()
    connections.begin_opening(first)
    connections.add(first)
    assert connections.make_room()
    connections.begin_opening(failed)
    connections.end_opening(failed)
    connections.end_opening(first)  # its task ends after it has opened
    assert connections.make_room()
