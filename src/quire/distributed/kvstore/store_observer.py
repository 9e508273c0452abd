"""The observer of the prefix cache on disk; an engine that publishes KV events has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreObserver(Protocol):
    """Receives (group, digest) of blocks that this engine writes to, finds on or deletes from disk; in either thread.

    A reset is not reported block by block; changes by other engines of the folder are not reported.
    """

    def on_stored(self, blocks: Sequence[tuple[int, bytes]]) -> None: ...

    def on_deleted(self, blocks: Sequence[tuple[int, bytes]]) -> None: ...
