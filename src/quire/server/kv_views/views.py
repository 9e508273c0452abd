"""Views of an engine for operators and the page: metrics, requests in flight, blocks, the prefix tree."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.errors import InvalidParameter
from quire.server.admission.in_flight import FirstTokenLog, InFlightRow, RequestsInFlight, first_token_times
from quire.server.kv_views.block_map import BlockMapHub, Watcher
from quire.server.kv_views.prefix_tree import PrefixTreeView

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.engine import Engine


class MapWatcher(Protocol):
    """A reader of the block map; see `Watcher`."""

    def events(self, idle_s: float) -> AsyncGenerator[bytes, None]:
        """Yield events until the watcher is closed, and a comment after a silence."""

    def close(self) -> None:
        """Let no further event be read."""

    def leave(self) -> None:
        """End watching."""


class ServerViews(Protocol):
    """Views for operators and the page."""

    async def watch(self, tenant: str | None) -> MapWatcher:
        """Return a new watcher of the block map, whose first event is a snapshot; see `BlockMapHub.watch`."""

    async def prefix_tree(self, tenant: str | None) -> dict[str, Any]:
        """Return the prefix tree; see `PrefixTreeView.read`."""

    async def describe_block(self, pool_idx: int, block_id: int, tenant: str | None) -> dict[str, Any]:
        """Return a block's state, holders and tokens, as far as a tenant may see them; None sees all."""

    async def describe_request(self, number: int, tenant: str | None) -> dict[str, Any] | None:
        """Return the block tables of a request and its prefix hit; None where a tenant has no request of the number."""

    async def in_flight(self) -> Sequence[InFlightRow]:
        """Return the HTTP requests in flight."""

    async def render_metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format."""

    def close(self) -> None:
        """Let all watchers leave, for the server stops."""


class LocalViews:
    """The views of a server that is in the engine's process.

    Args:
        llm: the engine.
        requests: the server's requests in flight.
    """

    def __init__(self, llm: AsyncLLM, requests: RequestsInFlight | FirstTokenLog) -> None:
        self._llm = llm
        self._requests = requests
        self._is_over = False
        self.block_map = BlockMapHub(llm, lambda: self._is_over, self._first_tokens)
        self._tree = PrefixTreeView(llm)

    async def watch(self, tenant: str | None) -> Watcher:
        """Return a new watcher of the block map."""
        return self.block_map.watch(tenant)

    async def prefix_tree(self, tenant: str | None) -> dict[str, Any]:
        """Return the prefix tree."""
        return await self._tree.read(tenant)

    async def describe_block(self, pool_idx: int, block_id: int, tenant: str | None) -> dict[str, Any]:
        """Return a block's state, holders and tokens.

        Raises:
            InvalidParameter: there is no such pool or block.
        """

        def look(engine: Engine) -> dict[str, Any]:
            from quire.engine.inputs.request_options import read_namespace
            from quire.engine.kv.block_map import describe_block, pool_sizes

            sizes = pool_sizes(engine.scheduler)
            if pool_idx >= len(sizes):
                raise InvalidParameter("pool", pool_idx, f"from 0 to {len(sizes) - 1}")
            if not 0 < block_id < sizes[pool_idx]:
                raise InvalidParameter("block", block_id, f"from 1 to {sizes[pool_idx] - 1}")
            viewer = read_namespace(engine.cache_name, None, tenant)
            found = describe_block(engine.scheduler, pool_idx, block_id, viewer)
            return {**found, "unchanged_s": self.block_map.unchanged_s(sum(sizes[:pool_idx]) + block_id)}

        return await self._llm.inspect(look)

    async def describe_request(self, number: int, tenant: str | None) -> dict[str, Any] | None:
        """Return the block tables of a request and its prefix hit."""

        def look(engine: Engine) -> dict[str, Any] | None:
            from quire.engine.kv.block_map import describe_request, number_of

            for each in engine.scheduler.requests.values():
                if number_of(each) == number and tenant in (None, each.namespace.tenant):
                    return describe_request(engine.scheduler, each)
            return None

        return await self._llm.inspect(look)

    async def in_flight(self) -> Sequence[InFlightRow]:
        """Return the HTTP requests in flight."""
        return self._requests.rows()

    async def render_metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self._llm.metrics.render()

    def close(self) -> None:
        """Let all watchers leave."""
        self._is_over = True

    def _first_tokens(self, tenant: str | None) -> list[float]:
        return first_token_times(tenant, self._requests.rows(), self._requests.ended())
