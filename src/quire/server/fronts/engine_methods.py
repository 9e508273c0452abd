"""The methods of the engine's process that fronts call, with what JSON has as arguments and results."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from quire.sequences.lora import LoRARequest
from quire.server.fronts.peer import Method
from quire.server.kv_views.views import LocalViews, MapWatcher

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.adapters import LoadedAdapter
    from quire.engine.async_llm import AsyncLLM


class EngineMethods:
    """The methods of one engine's process."""

    def __init__(
        self,
        llm: AsyncLLM,
        views: LocalViews,
        in_flight: Callable[[], Awaitable[list[Any]]],
        ask_http_requests: Callable[[], Awaitable[None]],
        publish_queue: Callable[[], None],
    ) -> None:
        self._llm = llm
        self._views = views
        self._ask_http_requests = ask_http_requests
        self._publish_queue = publish_queue
        self.by_name: Mapping[str, Method] = {
            "report": self._report,
            "drain": llm.drain,
            "has_added": llm.has_added,
            "pin_prefix": self._pin_prefix,
            "unpin_prefix": llm.unpin_prefix,
            "reset_prefix_cache": self._reset_prefix_cache,
            "list_adapters": self._list_adapters,
            "load_adapter": self._load_adapter,
            "unload_adapter": llm.adapters.unload,
            "prefix_tree": views.prefix_tree,
            "describe_block": views.describe_block,
            "describe_request": views.describe_request,
            "in_flight": in_flight,
            "render_metrics": self._render_metrics,
        }

    def count_http_requests(self, counts: list[Any]) -> None:
        """Add HTTP requests to the metrics: route, method, status and count of each kind."""
        for route, method, status, count in counts:
            self._llm.metrics.on_http_request(route, method, status, count)

    def watchers(self) -> RemoteWatchers:
        """Return the watchers of one front."""
        return RemoteWatchers(self._views)

    async def _report(self) -> Any:
        # A client that was told of an idle engine must find room in its queue.
        self._publish_queue()
        return msgspec.to_builtins(await self._llm.report())

    async def _pin_prefix(
        self, name: str, token_ids: list[int], cache_salt: str | None, tenant: str | None, adapter: str | None
    ) -> int:
        request = None if adapter is None else LoRARequest(adapter)
        prompt = {"prompt_token_ids": token_ids}
        return await self._llm.pin_prefix(name, prompt, cache_salt, tenant=tenant, lora_request=request)

    async def _reset_prefix_cache(self) -> None:
        await self._llm.reset_prefix_cache()

    async def _list_adapters(self) -> list[Any]:
        return list(map(adapter_fields, await self._llm.adapters.list_loaded()))

    async def _load_adapter(self, name: str, path: str, load_inplace: bool) -> Any:
        return adapter_fields(await self._llm.adapters.load(LoRARequest(name, 1, path, load_inplace)))

    async def _render_metrics(self) -> str:
        await self._ask_http_requests()
        return (await self._views.render_metrics()).decode()


def adapter_fields(adapter: LoadedAdapter) -> dict[str, Any]:
    """Return the fields of a loaded adapter."""
    return {name: getattr(adapter, name) for name in adapter.__slots__}


class RemoteWatchers:
    """The watchers of the block map that the clients of one front are."""

    def __init__(self, views: LocalViews) -> None:
        self._views = views
        self._numbers = itertools.count(1)
        self._watching: dict[int, tuple[MapWatcher, AsyncGenerator[bytes, None]]] = {}
        self.by_name: Mapping[str, Method] = {"watch": self._watch, "next_event": self._next_event}

    def close(self) -> None:
        """Let all of them leave."""
        for number in tuple(self._watching):
            self.leave(number)

    async def _watch(self, tenant: str | None, idle_s: float) -> int:
        watcher = await self._views.watch(tenant)
        number = next(self._numbers)
        self._watching[number] = watcher, watcher.events(idle_s)
        return number

    async def _next_event(self, number: int) -> str | None:
        """Return the next event of a watcher; None at its end."""
        _, events = self._watching.get(number, (None, None))
        if events is None:
            return None
        try:
            return (await anext(events)).decode()
        except StopAsyncIteration:
            return None

    def leave(self, number: int) -> None:
        """Let a watcher leave."""
        watcher, _ = self._watching.pop(number, (None, None))
        if watcher is not None:
            watcher.close()
            watcher.leave()
