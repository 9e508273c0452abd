"""Counters of the prefix cache on disk."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from quire.scheduling.stats import Metric


class StoreStats(NamedTuple):
    """Counters of a store since its start, and its current size, which all engines of the folder share."""

    num_blocks: Annotated[int, Metric("Blocks of this model on disk.", "prefix_cache_disk_blocks", "gauge")]
    num_bytes: Annotated[
        int,
        Metric("Bytes of blocks on disk, those of other models included.", "prefix_cache_disk_bytes", "gauge"),
    ]
    num_foreign: Annotated[
        int, Metric("Blocks of other models or layouts on disk.", "prefix_cache_disk_foreign_blocks", "gauge")
    ]
    num_hits: Annotated[int, Metric("Blocks loaded from disk.", "prefix_cache_disk_hits")]
    num_misses: Annotated[int, Metric("Requested blocks that were not on disk.", "prefix_cache_disk_misses")]
    loaded_bytes: Annotated[int, Metric("Bytes loaded from disk.", "prefix_cache_disk_loaded_bytes")]
    load_s: Annotated[float, Metric("Total time of loads.", "prefix_cache_disk_load_seconds")]
    num_saved: Annotated[int, Metric("Blocks written to disk.", "prefix_cache_disk_saved")]
    num_deleted: Annotated[int, Metric("Blocks evicted from disk.", "prefix_cache_disk_deleted")]
    num_dropped: Annotated[
        int, Metric("Blocks not written: the write queue was full, or space was lacking.", "prefix_cache_disk_dropped")
    ]
    num_damaged: Annotated[int, Metric("Damaged blocks and files.", "prefix_cache_disk_damaged")]
    num_full: Annotated[int, Metric("Writes that failed for lack of space.", "prefix_cache_disk_full")]
