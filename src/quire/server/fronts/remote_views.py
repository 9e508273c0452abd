"""The views of a front: calls of the engine's process, which asks all fronts for their requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from quire.errors import WorkerError
from quire.server.admission.in_flight import InFlightRow
from quire.server.fronts.peer import Peer
from quire.server.fronts.remote_engine import CALL_TIMEOUT_S


class RemoteWatcher:
    """A reader of the block map in the engine's process; see `Watcher`."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer = peer
        self._number = number
        self._over = asyncio.Event()

    async def events(self, idle_s: float) -> AsyncGenerator[bytes, None]:  # noqa: ARG002 - the other end has it
        """Yield events until the watcher is closed; the next one is asked for when this one was read."""
        over = asyncio.create_task(self._over.wait())
        try:
            while not self._over.is_set():
                asked = asyncio.create_task(self._peer.call("next_event", self._number))
                await asyncio.wait((asked, over), return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    asked.cancel()
                    return
                event = None if isinstance(asked.exception(), WorkerError) else asked.result()
                if event is None:
                    return
                yield event.encode()
        finally:
            over.cancel()

    def close(self) -> None:
        """Let no further event be read."""
        self._over.set()

    def leave(self) -> None:
        """End watching."""
        self.close()
        self._peer.notify("leave", self._number)


class RemoteViews:
    """The views of a front; see `ServerViews`."""

    def __init__(self, peer: Peer, ping_interval_s: float) -> None:
        self._peer = peer
        self._ping_interval_s = ping_interval_s

    async def watch(self, tenant: str | None) -> RemoteWatcher:
        """Return a new watcher of the block map."""
        number = await self._peer.call("watch", tenant, self._ping_interval_s, timeout_s=CALL_TIMEOUT_S)
        return RemoteWatcher(self._peer, number)

    async def prefix_tree(self, tenant: str | None) -> dict[str, Any]:
        """Return the prefix tree."""
        return dict(await self._peer.call("prefix_tree", tenant))

    async def describe_block(self, pool_idx: int, block_id: int, tenant: str | None) -> dict[str, Any]:
        """Return a block's state, holders and tokens."""
        return dict(await self._peer.call("describe_block", pool_idx, block_id, tenant, timeout_s=CALL_TIMEOUT_S))

    async def describe_request(self, number: int, tenant: str | None) -> dict[str, Any] | None:
        """Return the block tables of a request and its prefix hit."""
        found = await self._peer.call("describe_request", number, tenant, timeout_s=CALL_TIMEOUT_S)
        return None if found is None else dict(found)

    async def in_flight(self) -> Sequence[InFlightRow]:
        """Return the HTTP requests in flight of all fronts."""
        return [InFlightRow(*row) for row in await self._peer.call("in_flight", timeout_s=CALL_TIMEOUT_S)]

    async def render_metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return str(await self._peer.call("render_metrics", timeout_s=CALL_TIMEOUT_S)).encode()

    def close(self) -> None:
        """Nothing: the engine's process lets all watchers leave."""
