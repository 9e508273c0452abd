"""The counters of the prefix cache on disk."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from quire.scheduling.stats import Metric


class StoreStats(NamedTuple):
    """Counters of a store since its start, and its present size."""

    num_blocks: Annotated[int, Metric("Blocks of this model on disk.", "prefix_cache_disk_blocks", "gauge")]
    num_bytes: Annotated[
        int,
        Metric(
            "Bytes of the disk that blocks take, those of other models included.", "prefix_cache_disk_bytes", "gauge"
        ),
    ]
    num_foreign: Annotated[
        int, Metric("Blocks of other models or layouts on disk.", "prefix_cache_disk_foreign_blocks", "gauge")
    ]
    num_hits: Annotated[int, Metric("Blocks loaded from disk.", "prefix_cache_disk_hits")]
    num_misses: Annotated[int, Metric("Blocks that were asked for in vain.", "prefix_cache_disk_misses")]
    loaded_bytes: Annotated[int, Metric("Bytes loaded from disk.", "prefix_cache_disk_loaded_bytes")]
    load_s: Annotated[float, Metric("Time that loads took.", "prefix_cache_disk_load_seconds")]
    num_saved: Annotated[int, Metric("Blocks written to disk.", "prefix_cache_disk_saved")]
    num_deleted: Annotated[int, Metric("Blocks deleted to make room for others.", "prefix_cache_disk_deleted")]
    num_dropped: Annotated[
        int, Metric("Blocks that were not written: too many waited, or there was no room.", "prefix_cache_disk_dropped")
    ]
    num_damaged: Annotated[
        int, Metric("Blocks and files that were not as they were written.", "prefix_cache_disk_damaged")
    ]
    num_full: Annotated[int, Metric("Writes for which there was no room.", "prefix_cache_disk_full")]
