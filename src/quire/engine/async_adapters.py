"""The adapters of an engine that steps in its own thread: other threads read folders while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.adapters import AdapterRegistry, LoadedAdapter, require_adapters
from quire.errors import OutOfAdapterMemory
from quire.sequences.lora import LoRARequest

if TYPE_CHECKING:
    from quire.models.adapters.slots import Adapter


class AsyncAdapters:
    """Loads and unloads adapters between two steps of an engine.

    Args:
        registry: registry of the engine; None without `enable_lora`.
        call: function that runs another one in the engine's thread, between two steps, and returns its result.
    """

    def __init__(
        self, registry: AdapterRegistry | None, call: Callable[[Callable[[Any], Any]], Awaitable[Any]]
    ) -> None:
        self._registry, self._call = registry, call

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Loaded adapters, in the order in which they were loaded; empty without `enable_lora`."""
        return () if self._registry is None else self._registry.loaded

    async def load(self, lora_request: LoRARequest, *, is_kept: bool = True) -> LoadedAdapter:
        """Load an adapter.

        Args:
            lora_request: name and path.
            is_kept: False for an adapter that may be evicted for others when no request uses it.

        Raises:
            RequestError: the name is in use and `load_inplace` is not set, the folder has no adapter that fits, or the
                GPU has no memory left for it.
            WorkerError: the engine is dead.
        """
        registry = require_adapters(self._registry)
        while True:
            try:
                adapter = await self._read(registry, lora_request.lora_path)
                break
            except OutOfAdapterMemory:
                if not await self._call(lambda _: registry.give_way()):
                    raise
        loaded: LoadedAdapter = await self._call(lambda _: registry.load(lora_request, adapter, is_kept=is_kept))
        return loaded

    async def _read(self, registry: AdapterRegistry, path: str) -> Adapter:
        """Read an adapter in another thread.

        The thread does not return it, because a pool's thread may keep its last result: the adapter's memory is freed
        with the last reference.
        """
        adapters: list[Adapter] = []
        await asyncio.to_thread(lambda: adapters.append(registry.read(path)))
        return adapters.pop()

    async def unload(self, lora_name: str) -> None:
        """Unload an adapter: requests that use it continue, new ones are refused.

        Raises:
            RequestError: no adapter of that name is loaded.
            WorkerError: the engine is dead.
        """
        registry = require_adapters(self._registry)
        await self._call(lambda _: registry.unload(lora_name))

    async def ready(self, lora_request: LoRARequest | None) -> LoRARequest | None:
        """Load the adapter of a request if it is not loaded; return the request for the loaded one.

        Raises:
            RequestError: see `load`.
        """
        if self._registry is None or not isinstance(lora_request, LoRARequest):
            return lora_request  # the engine refuses it, unless it is None
        if self._registry.find(lora_request) is None:
            await self.load(lora_request, is_kept=False)
        return replace(lora_request, load_inplace=False)
