"""Adapters of a model that ranks share: each rank reads the folders, and has its shard of the matrices.

All ranks read a folder before any of them uses it, in other threads than the steps. So an adapter that another rank
does not find, or finds with other content, is refused before it is used. Then commands of rank 0 set the slots.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.distributed.ranks import RankCalls
from quire.errors import CheckpointError, LockstepDrift, QuireError
from quire.models.adapters.slots import Adapter, AdapterSlots

logger = logging.getLogger(__name__)


class LeaderSlots:
    """The slots of all ranks, on rank 0."""

    def __init__(
        self, inner: AdapterSlots, calls: RankCalls, log: Callable[[int, str | None, str | None], None]
    ) -> None:
        self._inner, self._calls, self._log = inner, calls, log

    def read(self, folder: Path) -> Adapter:
        """Read an adapter on all ranks; thread-safe, and may take long."""
        folder = folder.absolute()
        with self._calls.ask(str(folder)) as answers:
            adapter = self._inner.read(folder)
        for rank, answer in answers.items():
            if "error" in answer:
                raise CheckpointError(f"rank {rank} cannot load it: {answer['error']}", field="lora_path")
            if answer["digest"] != adapter.digest:
                raise CheckpointError(f"rank {rank} finds another adapter in {folder}", field="lora_path")
        return adapter

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """Set the adapter of a slot, None for none; between two steps."""
        self._inner.put(slot, adapter)
        self._log(slot, *((None, None) if adapter is None else (adapter.digest, str(adapter.folder))))


class FollowerSlots:
    """The slots of a rank other than 0, which are set by commands of rank 0."""

    def __init__(self, inner: AdapterSlots, limit: int) -> None:
        self._inner, self._limit = inner, limit
        self._lock = threading.Lock()
        self._unused: dict[str, Adapter] = {}  # by digest, in the order of reading
        inner.memory.make_room = self._drop_oldest

    def read(self, folder: Path) -> Adapter:
        """See `AdapterSlots.read`."""
        return self._inner.read(folder)

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """See `AdapterSlots.put`."""
        self._inner.put(slot, adapter)

    def answer(self, folder: str) -> dict[str, Any]:
        """Read an adapter that rank 0 may soon use; return its digest, or the error; thread-safe."""
        try:
            adapter = self.read(Path(folder))
        except Exception as error:  # rank 0 would wait for the answer
            if not isinstance(error, (QuireError, OSError)):
                logger.exception("the adapter in %s cannot be read", folder)
            return {"error": str(error) or type(error).__name__}
        with self._lock:
            self._unused.pop(adapter.digest, None)
            self._unused[adapter.digest] = adapter
            if len(self._unused) > self._limit:
                del self._unused[next(iter(self._unused))]
        return {"digest": adapter.digest}

    def _drop_oldest(self) -> bool:
        """Drop the unused adapter that was read first; return False if there is none."""
        with self._lock:
            return self._unused.pop(next(iter(self._unused), ""), None) is not None

    def repeat(self, slot: int, digest: str | None, folder: str | None) -> None:
        """Set the adapter of a slot, as commanded by rank 0."""
        if digest is None or folder is None:
            self.put(slot, None)
            return
        with self._lock:
            adapter = self._unused.pop(digest, None)
        adapter = adapter or self.read(Path(folder))
        if adapter.digest != digest:
            raise LockstepDrift(f"the adapter in {folder} has changed since rank 0 has read it")
        self.put(slot, adapter)
