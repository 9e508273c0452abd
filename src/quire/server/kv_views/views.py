"""Views of an engine for operators and the page: blocks, requests, the prefix tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import InvalidParameter
from quire.server.admission.in_flight import RequestsInFlight
from quire.server.kv_views.block_map import BlockMapHub
from quire.server.kv_views.prefix_tree import PrefixTreeView

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.engine import Engine


class ServerViews:
    """Views of an engine for operators and the page."""

    def __init__(self, llm: AsyncLLM, requests: RequestsInFlight) -> None:
        self._llm = llm
        self._is_over = False
        self.block_map = BlockMapHub(llm, lambda: self._is_over, requests.first_token_times)
        self.prefix_tree = PrefixTreeView(llm)

    async def describe_block(self, pool_idx: int, block_id: int, tenant: str | None) -> dict[str, Any]:
        """Return a block's state, holders and tokens, as far as a tenant may see them; None sees all."""

        def look(engine: Engine) -> dict[str, Any]:
            from quire.engine.inputs.request_options import read_namespace
            from quire.engine.kv.block_map import describe_block, pool_sizes

            sizes = pool_sizes(engine.scheduler)
            if pool_idx >= len(sizes):
                raise InvalidParameter("pool", pool_idx, f"from 0 to {len(sizes) - 1}")
            if not 0 < block_id < sizes[pool_idx]:
                raise InvalidParameter("block", block_id, f"from 1 to {sizes[pool_idx] - 1}")
            viewer = read_namespace(engine.cache_name, None, tenant)
            block = describe_block(engine.scheduler, pool_idx, block_id, viewer)
            return {**block, "unchanged_s": self.block_map.unchanged_s(sum(sizes[:pool_idx]) + block_id)}

        return await self._llm.inspect(look)

    async def describe_request(self, number: int, tenant: str | None) -> dict[str, Any] | None:
        """Return the block tables of a request and its prefix hit; None if the tenant has no request of this number."""

        def look(engine: Engine) -> dict[str, Any] | None:
            from quire.engine.kv.block_map import describe_request, number_of

            for request in engine.scheduler.requests.values():
                if number_of(request) == number and tenant in (None, request.namespace.tenant):
                    return describe_request(engine.scheduler, request)
            return None

        return await self._llm.inspect(look)

    def close(self) -> None:
        """End all watchers, because the server stops."""
        self._is_over = True
