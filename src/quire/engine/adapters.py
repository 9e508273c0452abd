"""The loaded adapters by name, and the data plane's slots that hold their contents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quire.errors import (
    ConfigError,
    InvalidAdapter,
    InvalidParameter,
    OutOfAdapterMemory,
    UnknownAdapter,
    UnsupportedFeature,
)
from quire.platform.bounded.files import user_path
from quire.sequences.lora import LoRARequest

if TYPE_CHECKING:
    from quire.models.adapters.slots import Adapter

# Adapters of several prompts: one for all of them, or one or None for each.
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter that is loaded under a name.

    Args:
        name: name by which requests select it.
        path: folder that it was read from.
        digest: digest of its content, which is part of the identity of its blocks.
        slot: slot in the data plane; adapters of the same content share one.
        is_kept: True if it stays until it is unloaded; False if a request loaded it, so it may be evicted.
        last_use: number of uses of all adapters at its last use.
    """

    name: str
    path: str
    digest: str
    slot: int
    is_kept: bool
    last_use: int = 0


class DataPlaneSlots(Protocol):
    """The adapter slots of the data plane, on all ranks."""

    def read(self, folder: Path) -> Adapter:
        """See `quire.models.adapters.slots.AdapterSlots`."""

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """See `quire.models.adapters.slots.AdapterSlots`."""


class AdapterRegistry:
    """Loads and unloads adapters by name; methods other than `read` and `find` are called between two steps.

    A slot is freed when no name refers to its content and no unfinished request uses it.
    """

    def __init__(
        self, slots: DataPlaneSlots, limit: int, used_slots: Callable[[], Iterable[int | None]], model_name: str
    ) -> None:
        self.slots, self.limit = slots, limit
        self._used_slots, self._model_name = used_slots, model_name
        self._by_name: dict[str, LoadedAdapter] = {}
        self._slot_of: dict[str, int] = {}  # by digest
        self._num_uses = 0

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Loaded adapters, in the order in which they were loaded; may be read from any thread."""
        return tuple(self._by_name.values())

    def read(self, path: str) -> Adapter:
        """Read an adapter from its folder, which may take long; thread-safe."""
        try:
            return self.slots.read(user_path(path))
        except ConfigError as error:
            raise InvalidAdapter(str(error), field=error.field or "lora_path") from error

    def find(self, request: LoRARequest) -> LoadedAdapter | None:
        """Return the adapter that a request selects; None if its folder must be read first. Thread-safe."""
        entry = self._by_name.get(request.lora_name)
        if request.load_inplace:
            return None
        if entry is None and not request.lora_path:
            raise UnknownAdapter(request.lora_name)
        if entry is not None and request.lora_path not in ("", entry.path):
            raise InvalidAdapter(
                f"lora_path of the adapter {request.lora_name!r} must be {entry.path!r}, which it was loaded from, got "
                f"{request.lora_path!r}; choose another name, or set load_inplace",
                field="lora_path",
            )
        return entry

    def acquire(self, request: LoRARequest) -> LoadedAdapter:
        """Return the adapter that a request selects; load it if it is not loaded."""
        adapter = self.find(request)
        while adapter is None:
            try:
                adapter = self.load(request, self.read(request.lora_path), is_kept=False)
            except OutOfAdapterMemory:
                if not self.give_way():
                    raise
        self._num_uses += 1
        adapter.last_use = self._num_uses
        return adapter

    def load(self, request: LoRARequest, adapter: Adapter, *, is_kept: bool = True) -> LoadedAdapter:
        """Load an adapter under a name; with `load_inplace`, replace the adapter that has the name.

        Unfinished requests continue with the content that they started with.
        """
        name = request.lora_name
        if name == self._model_name:
            raise InvalidAdapter(f"lora_name must differ from the model's name, got {name!r}", field="lora_name")
        previous = self._by_name.get(name)
        if previous is not None and not request.load_inplace:
            if (previous.path, previous.digest) != (request.lora_path, adapter.digest) or is_kept:
                raise InvalidAdapter(
                    f"lora_name must be a name that is not in use, got {name!r}; unload that adapter first, or set "
                    "load_inplace",
                    field="lora_name",
                )
            return previous
        if previous is not None:
            is_kept = is_kept or previous.is_kept
            del self._by_name[name]
        try:
            slot = self._place(adapter)
        except InvalidAdapter:
            if previous is not None:
                self._by_name[name] = previous
            raise
        loaded = LoadedAdapter(name, request.lora_path, adapter.digest, slot, is_kept, self._num_uses)
        self._by_name[name] = loaded
        return loaded

    def unload(self, name: str) -> None:
        """Unload an adapter: requests that use it continue, and new ones cannot select it."""
        if name not in self._by_name:
            raise UnknownAdapter(name)
        del self._by_name[name]
        self.free_unused()

    def free_unused(self) -> None:
        """Free the slots of contents that have no name and no unfinished request."""
        named = {adapter.slot for adapter in self._by_name.values()}
        if len(named) == len(self._slot_of):
            return
        kept = named.union(slot for slot in self._used_slots() if slot is not None)
        for digest, slot in tuple(self._slot_of.items()):
            if slot not in kept:
                self.slots.put(slot, None)
                del self._slot_of[digest]

    def give_way(self) -> bool:
        """Unload the least recently used idle adapter that a request loaded; return False if there is none."""
        used = set(self._used_slots())
        idle = [adapter for adapter in self._by_name.values() if not adapter.is_kept and adapter.slot not in used]
        if not idle:
            return False
        self.unload(min(idle, key=lambda adapter: adapter.last_use).name)
        return True

    def _place(self, adapter: Adapter) -> int:
        """Return the slot of an adapter's content; content without a slot is put into a free one."""
        slot = self._slot_of.get(adapter.digest)
        if slot is not None:
            return slot
        self.free_unused()
        while len(self._slot_of) >= self.limit:
            if not self.give_way():
                raise InvalidAdapter(
                    f"{len(self._slot_of)} adapters are loaded, and max_cpu_loras is {self.limit}: unload one, or "
                    "raise it",
                    field="max_cpu_loras",
                )
        slot = next(number for number in range(self.limit) if number not in self._slot_of.values())
        self.slots.put(slot, adapter)
        self._slot_of[adapter.digest] = slot
        return slot


def require_adapters(adapters: AdapterRegistry | None) -> AdapterRegistry:
    """Return the registry of an engine; raise `UnsupportedFeature` if it has none."""
    if adapters is None:
        raise UnsupportedFeature(
            "lora_request", "this engine serves no adapters beside the model; start with enable_lora"
        )
    return adapters


def acquire_adapter(adapters: AdapterRegistry | None, lora_request: LoRARequest | None) -> LoadedAdapter | None:
    """Return the adapter of a request, loaded if it was not; None for a request without one."""
    if lora_request is None:
        return None
    registry = require_adapters(adapters)
    if not isinstance(lora_request, LoRARequest):
        raise InvalidParameter("lora_request", lora_request, "a LoRARequest or None")
    return registry.acquire(lora_request)


def adapters_of(adapters: Adapters, count: int) -> Sequence[LoRARequest | None]:
    """Return one adapter, or None, for each prompt."""
    if adapters is None or isinstance(adapters, LoRARequest):
        return [adapters] * count
    if not isinstance(adapters, list | tuple) or len(adapters) != count:
        allowed = f"a LoRARequest, or a list of one or None for each of {count} prompts"
        raise InvalidParameter("lora_request", adapters, allowed)
    return adapters
