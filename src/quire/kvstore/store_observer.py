"""The listener to the prefix cache on disk; an engine that publishes KV events has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreObserver(Protocol):
    """Listens to what this engine writes and finds on disk, group and digest of each block; called in either thread.

    A reset is not told block by block, nor is what other engines of the folder do.
    """

    def on_stored(self, blocks: Sequence[tuple[int, bytes]]) -> None: ...

    def on_deleted(self, blocks: Sequence[tuple[int, bytes]]) -> None: ...
