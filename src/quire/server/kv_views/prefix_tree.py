"""The prefix tree for the page: read on request, at most once a second for each tenant and in a bounded time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.server.requests.errors import unavailable

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.engine import Engine
    from quire.engine.kv.prefix_tree import TreeScan
    from quire.text.tokenizers.tokenizer import Tokenizer

INTERVAL_S = 1.0
# All readings together take at most a fortieth of the time.
REST_PER_COST = 39
MAX_KEPT = 16
MAX_READERS = 32


class KeptTree(NamedTuple):
    """A tree that was read.

    Args:
        body: the answer.
        mark: change mark of the engine at that time.
        until_s: time of the monotonic clock until which it is not read again.
    """

    body: dict[str, Any]
    mark: tuple[int, ...]
    until_s: float


class PrefixTreeView:
    """The prefix tree of one engine, as its viewers see it.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._kept: dict[str | None, KeptTree] = {}
        self._lock = asyncio.Lock()
        self._num_readers = 0
        self._rest_until_s = 0.0

    async def read(self, tenant: str | None) -> dict[str, Any]:
        """Return the segments of the tree, with their first tokens as text.

        Args:
            tenant: tenant whose prefixes are shown; None for all.

        Raises:
            ApiError: 503, `MAX_READERS` wait for a tree already.
            WorkerError: the engine is dead.
        """
        if self._num_readers >= MAX_READERS:
            raise unavailable(f"{MAX_READERS} clients wait for the prefix tree already", "too_many_watchers")
        self._num_readers += 1
        try:
            async with self._lock:
                kept = self._kept.get(tenant)
                mark = self._llm.change_mark()
                if kept is None or (mark != kept.mark and time.monotonic() >= kept.until_s):
                    await asyncio.sleep(self._rest_until_s - time.monotonic())
                    kept = await self._look(tenant, mark)
                return kept.body
        finally:
            self._num_readers -= 1

    async def _look(self, tenant: str | None, mark: tuple[int, ...]) -> KeptTree:
        scan, cost_s = await self._llm.inspect(lambda engine: _scan(engine, tenant))
        segments = await asyncio.to_thread(_to_json, scan, self._llm.tokenizer)
        self._rest_until_s = time.monotonic() + REST_PER_COST * cost_s
        kept = KeptTree({"segments": segments, "is_whole": scan.is_whole}, mark, time.monotonic() + INTERVAL_S)
        self._kept.pop(tenant, None)
        self._kept[tenant] = kept
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return kept


def _to_json(scan: TreeScan, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    segments = []
    for segment in scan.segments:
        row = segment._asdict()
        label_ids = row.pop("label_ids")
        row["text"] = None if tokenizer is None or label_ids is None else tokenizer.decode(label_ids)
        segments.append(row)
    return segments


def _scan(engine: Engine, tenant: str | None) -> tuple[TreeScan, float]:
    """Return the tree and the processor's seconds that it took; run in the engine's thread."""
    from quire.engine.inputs.request_options import read_namespace
    from quire.engine.kv.prefix_tree import scan_tree

    began_s = time.thread_time()
    scan = scan_tree(engine.scheduler, read_namespace(engine.cache_name, None, tenant))
    return scan, time.thread_time() - began_s
