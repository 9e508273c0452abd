"""The live map of the KV cache: snapshots and changes of all blocks' states, for a bounded number of watchers.

The map is compared with its last state up to ten times a second, only while there are watchers and something has
changed. This is cheaper than an observer of every command: a step costs the same with and without watchers, and many
steps between two comparisons cost one comparison. A slow watcher loses events that it has not read, and gets a snapshot
instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import WorkerError
from quire.server.http import sse
from quire.server.kv_views.block_planes import Planes
from quire.server.requests.errors import unavailable

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.engine import Engine
    from quire.engine.kv.block_map import BlockScan, RequestRow
    from quire.engine.metrics.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_WATCHERS = 16
INTERVAL_S = 0.1
# Long comparisons are made less often, so that all together take at most a fortieth of the time; processor time is
# measured, because it does not depend on the machine's other load.
REST_PER_COST = 39


class Watcher:
    """A reader of the map, with at most one event that it has not read.

    Args:
        hub: the map.
        tenant: tenant whose requests it may see; None for all.
    """

    def __init__(self, hub: BlockMapHub, tenant: str | None) -> None:
        self.tenant = tenant
        self._hub = hub
        self._event: bytes | None = None
        self._is_behind = True
        self._is_closed = False
        self._has_happened = asyncio.Event()

    def put(self, event: bytes) -> None:
        """Give an event to read; if an earlier one is unread, both are replaced by a snapshot."""
        self._is_behind |= self._event is not None
        self._event = None if self._is_behind else event
        self._has_happened.set()

    def leave(self) -> None:
        """End watching."""
        self._hub.leave(self)

    def close(self) -> None:
        """End `events`."""
        self._is_closed = True
        self._has_happened.set()

    async def events(self, idle_s: float) -> AsyncGenerator[bytes, None]:
        """Yield events until the watcher is closed, and a comment after a silence."""
        while not self._is_closed:
            try:
                async with asyncio.timeout(idle_s):
                    await self._has_happened.wait()
            except TimeoutError:
                yield sse.PING.encode()
                continue
            self._has_happened.clear()
            if self._is_behind:
                self._is_behind = not (event := self._hub.snapshot(self.tenant))
            else:
                event = self._event or b""
            self._event = None
            if event and not self._is_closed:
                yield event


class BlockMapHub:
    """The map of one engine, and its watchers.

    Args:
        llm: the engine.
        is_over: function that returns True once all watchers are to leave.
        first_tokens: function that returns the latest times to the first token of a tenant's requests, in seconds; None
            for all tenants.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        is_over: Callable[[], bool],
        first_tokens: Callable[[str | None], Sequence[float]] = lambda _: (),
    ) -> None:
        self._llm = llm
        self._first_tokens = first_tokens
        self._is_over = is_over
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._scan: BlockScan | None = None
        self._totals: EngineStats | None = None
        self._planes: Planes | None = None
        self._mark: tuple[int, ...] = ()
        # Snapshots since the last comparison by tenant, and the seconds that they took.
        self._snapshots: dict[str | None, bytes] = {}
        self._snapshots_s = 0.0
        # Seconds of the monotonic clock at which a cell was last seen to change.
        self._changed_s: dict[int, float] = {}

    def watch(self, tenant: str | None) -> Watcher:
        """Return a new watcher, whose first event is a snapshot.

        Args:
            tenant: tenant whose requests it may see; None for all.

        Raises:
            ApiError: 503, there are `MAX_WATCHERS`.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise unavailable(f"the block map has {MAX_WATCHERS} watchers already", "too_many_watchers")
        watcher = Watcher(self, tenant)
        self._watchers.add(watcher)
        if self._planes is not None:
            watcher.put(b"")
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher; without watchers, comparisons stop."""
        self._watchers.discard(watcher)

    def current(self) -> tuple[BlockScan, Planes] | None:
        """Return the scan and the planes of the last comparison; None before the first comparison."""
        return None if self._planes is None or self._scan is None else (self._scan, self._planes)

    def unchanged_s(self, cell: int) -> float | None:
        """Return the seconds since a cell was last seen to change; None if no change was seen since watching began."""
        since_s = self._changed_s.get(cell)
        return None if since_s is None else time.monotonic() - since_s

    def snapshot(self, tenant: str | None) -> bytes:
        """Return the event with the whole map; empty before the first comparison."""
        if self._planes is None or self._scan is None:
            return b""
        if tenant in self._snapshots:
            return self._snapshots[tenant]
        began_s = time.thread_time()
        pools = [
            {"tier": pool.tier.name.lower(), "group": pool.group_idx, "cells": len(pool.holders)}
            for pool in self._scan.pools
        ]
        resolved = self._llm.resolved
        layout = {"pools": pools, "block_size": resolved.block_size, "bytes_per_block": resolved.bytes_per_block}
        event = self._snapshots[tenant] = self._event(tenant, self._planes.changed(None), {"layout": layout})
        self._snapshots_s += time.thread_time() - began_s
        return event

    async def _run(self) -> None:
        """Compare the map and send its changes while there are watchers."""
        try:
            while self._watchers and not self._is_over():
                mark = self._llm.change_mark()
                cost_s, self._snapshots_s = self._snapshots_s, 0.0
                if mark != self._mark or self._planes is None:
                    scan, self._totals, scan_s = await self._llm.inspect(_scan)
                    cost_s += scan_s + self._tell(scan)
                    self._mark = mark
                await asyncio.sleep(max(INTERVAL_S, REST_PER_COST * cost_s))
                if not self._watchers:
                    await self._llm.inspect(_stop_recording)
        except WorkerError as error:
            logger.debug("the block map ends: %s", error)
        finally:
            # Without watchers the planes would be out of date.
            self._planes, self._scan = None, None
            self._snapshots.clear()
            self._changed_s.clear()
            for watcher in self._watchers:
                watcher.close()

    def _tell(self, scan: BlockScan) -> float:
        """Send the changes to every watcher; return the seconds of processor time that this took."""
        began_s = time.thread_time()
        self._scan = scan
        self._snapshots.clear()
        before, self._planes = self._planes, Planes.of(scan, self._planes)
        cells = self._planes.changed(before)
        if before is not None:
            self._changed_s.update(dict.fromkeys(cells, time.monotonic()))
        events: dict[str | None, bytes] = {}
        for watcher in self._watchers:
            if before is not None and watcher.tenant not in events:
                events[watcher.tenant] = self._event(watcher.tenant, cells, {})
            watcher.put(events.get(watcher.tenant, b""))
        return time.thread_time() - began_s

    def _event(self, tenant: str | None, cells: list[int], extra: dict[str, Any]) -> bytes:
        assert self._planes is not None
        assert self._scan is not None
        assert self._totals is not None
        scan, usage, totals = self._scan, self._scan.usage, self._totals
        rows = [row for row in scan.rows if tenant in (None, row.tenant)]
        visible = None if tenant is None else {row.number for row in rows}
        counters = ("num_blocks", "used", "idle", "free", "num_evictions", "num_copies", "num_merges")
        return sse.StreamFormat().one(
            {
                **extra,
                "runs": b64encode(self._planes.runs(cells, visible)).decode(),
                "recent": self._planes.recent(scan, visible),
                "requests": list(map(_row_to_json, rows)),
                "queue": dict(zip(("running", "waiting", "swapped"), scan.queue, strict=True)),
                "usage": {name: getattr(usage, name) for name in counters},
                "host": usage.host and {name: getattr(usage.host, name) for name in counters[:5]},
                "disk_blocks": totals.disk and totals.disk.num_blocks,
                "first_token_s": _quantiles(self._first_tokens(tenant)),
                "totals": {
                    "prompt_tokens": totals.prompt_tokens,
                    "generation_tokens": totals.generation_tokens,
                    "queried_tokens": totals.prefix_queries,
                    "hit_tokens": totals.prefix_hits,
                    "preemptions": totals.num_preemptions,
                },
            }
        )


def _quantiles(times_s: Sequence[float]) -> dict[str, float] | None:
    """Return the median and the 90th percentile of times; None without any."""
    ordered = sorted(times_s)
    return {f"p{share}": round(ordered[len(ordered) * share // 100], 4) for share in (50, 90)} if ordered else None


def _stop_recording(engine: Engine) -> None:
    from quire.engine.kv.block_map import stop_recording

    stop_recording(engine.scheduler)


def _scan(engine: Engine) -> tuple[BlockScan, EngineStats, float]:
    """Return a scan, the totals and the seconds that they took; run in the engine's thread."""
    from quire.engine.kv.block_map import scan_blocks

    began_s = time.thread_time()
    return scan_blocks(engine.scheduler), engine.stats, time.thread_time() - began_s


def _row_to_json(row: RequestRow) -> dict[str, Any]:
    return {name: value for name, value in row._asdict().items() if name != "tenant"}
