"""The KV events of an engine, of its memory and of its blocks on disk, in one numbered stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from quire.distributed.kv_events.publisher import KVEventPublisher
from quire.distributed.kvstore.prefix_store import PrefixStore
from quire.memory.kv_events import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventCollector,
    hash_of,
)
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.radix_node import NodePosition
from quire.memory.results import Tier


class KVEventSource:
    """Publishes the events of an engine, one batch a step.

    Blocks that earlier runs left on disk are announced once they are loaded, or would be saved again: a record on disk
    does not name its namespace.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        publisher: KVEventPublisher,
        adapter_name: Callable[[str], str],
        form: str,
        store: PrefixStore | None = None,
    ) -> None:
        self._collector = KVEventCollector(memory, adapter_name)
        self._publisher = publisher
        self._form = form
        self._block_size = memory.block_size
        self._wants_all = False
        self.wake: Callable[[], None] | None = None
        publisher.on_resend = self.request_all
        self._lock = threading.Lock()
        # Blocks by group and digest: blocks that are being written to disk, and announced blocks on disk.
        self._being_saved: dict[tuple[int, bytes], BlockStored] = {}
        self._on_disk: dict[tuple[int, bytes], BlockStored] = {}
        if store is not None and memory.archive is not None:
            memory.archive.observer = self
            store.observer = self

    # ---- the engine's thread ----

    def publish_step(self) -> None:
        """Publish the events since the last call, if any, or all blocks, if a subscriber has requested them."""
        if self._wants_all:
            self._wants_all = False
            self._publish_all()
        elif self._collector.has_events:
            self._publish(self._collector.take_events())

    def describe(self) -> dict[str, Any]:
        """Return the subscription data that `GET /kv_event_sources` shows."""
        return {
            "publisher": "zmq",
            "endpoint": self._publisher.endpoint,
            "replay_endpoint": self._publisher.replay_endpoint,
            "topic": self._publisher.topic,
            "format": self._form,
            "block_size": self._block_size,
            "next_seq": self._publisher.next_seq,
            "num_dropped": self._publisher.num_dropped,
        }

    def on_save(self, group_idx: int, where: NodePosition) -> None:
        """Record that a block is about to be written to disk."""
        event = self._collector.saved(group_idx, where)
        with self._lock:
            self._being_saved[group_idx, where[0].digest(where[1])] = event

    # ---- any thread ----

    def request_all(self) -> None:
        """Request that all blocks are published, for a subscriber that has lost events."""
        self._wants_all = True
        if self.wake is not None:
            self.wake()

    def on_stored(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Publish that blocks are on disk now, or were already."""
        with self._lock:
            events: list[KVEvent] = []
            for block in blocks:
                event = self._being_saved.pop(block, None)
                if event is not None and block not in self._on_disk:
                    self._on_disk[block] = event
                    events.append(event)
            if events:
                self._publisher.publish(events)

    def on_deleted(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Publish that blocks were deleted from disk."""
        with self._lock:
            medium = MEDIA[Tier.DISK]
            removed = [block for block in blocks if self._on_disk.pop(block, None) is not None]
            events: list[KVEvent] = [BlockRemoved((hash_of(digest),), medium, group) for group, digest in removed]
            if events:
                self._publisher.publish(events)

    # ---- parts ----

    def _publish_all(self) -> None:
        """Publish all blocks instead of the events since the last call."""
        events = self._collector.take_events()
        with self._lock:
            self._forget_disk(events)
            self._publisher.publish([*self._collector.snapshot(), *self._on_disk.values()])

    def _publish(self, events: list[KVEvent]) -> None:
        """Publish events of the memory; a reset clears the disk, too."""
        with self._lock:
            self._forget_disk(events)
            self._publisher.publish(events)

    def _forget_disk(self, events: Sequence[KVEvent]) -> None:
        if any(isinstance(event, AllBlocksCleared) for event in events):
            self._on_disk.clear()
            self._being_saved.clear()
