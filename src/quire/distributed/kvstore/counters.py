"""Counters of the sources of blocks, and the statistics of each kind of source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

from quire.scheduling.stats import Metric

Stats = TypeVar("Stats", bound="StoreStats | RemoteStats | TransferStats")


@dataclass(slots=True)
class SourceCounters:
    """Counters of a source since its start; the statistics of each kind of source show some of them."""

    num_hits: int = 0
    num_misses: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    num_late: int = 0
    num_refused: int = 0
    num_failures: int = 0
    num_damaged: int = 0
    num_saved: int = 0
    num_deleted: int = 0
    num_dropped: int = 0
    num_full: int = 0

    def shown_as(self, stats: type[Stats], **levels: Any) -> Stats:
        """Return the statistics of a source; `levels` has the values of fields without a counter here."""
        counted: dict[str, Any] = {name: getattr(self, name) for name in stats._fields if name not in levels}
        return stats(**counted, **levels)


class StoreStats(NamedTuple):
    """Counters of a store since its start, and its current size, which all engines of the folder share."""

    num_blocks: Annotated[
        int, Metric("Blocks, and features of images, of this model on disk.", "prefix_cache_disk_blocks", "gauge")
    ]
    num_bytes: Annotated[
        int, Metric("Bytes of blocks on disk, those of other models included.", "prefix_cache_disk_bytes", "gauge")
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


class RemoteStats(NamedTuple):
    """Counters of a remote store since the engine's start."""

    num_hits: Annotated[int, Metric("Blocks loaded from the remote store.", "prefix_cache_remote_hits")]
    num_misses: Annotated[
        int, Metric("Requested blocks that the remote store did not have.", "prefix_cache_remote_misses")
    ]
    loaded_bytes: Annotated[int, Metric("Bytes loaded from the remote store.", "prefix_cache_remote_loaded_bytes")]
    load_s: Annotated[
        float, Metric("Time that prompts waited for the remote store.", "prefix_cache_remote_load_seconds")
    ]
    num_late: Annotated[int, Metric("Timeouts of prompts that waited for the store.", "prefix_cache_remote_late")]
    num_refused: Annotated[
        int,
        Metric("Prompts without a request to the store: it had failed, or was busy.", "prefix_cache_remote_refused"),
    ]
    num_failures: Annotated[int, Metric("Failed calls of the remote store.", "prefix_cache_remote_failures")]
    num_damaged: Annotated[int, Metric("Damaged blocks of the remote store.", "prefix_cache_remote_damaged")]
    num_saved: Annotated[int, Metric("Blocks written to the remote store.", "prefix_cache_remote_saved")]
    num_dropped: Annotated[
        int,
        Metric(
            "Blocks not written to the remote store: the write queue was full, or it had failed.",
            "prefix_cache_remote_dropped",
        ),
    ]
    is_open: Annotated[
        int,
        Metric("1 while the circuit breaker is open, after failures.", "prefix_cache_remote_circuit_open", "gauge"),
    ]


class TransferStats(NamedTuple):
    """Counters of KV transfer since the engine's start, and the current size of the exported blocks."""

    num_kept: Annotated[int, Metric("Blocks kept for other engines.", "kv_transfer_kept_blocks", "gauge")]
    kept_bytes: Annotated[int, Metric("Bytes of blocks kept for other engines.", "kv_transfer_kept_bytes", "gauge")]
    num_sent: Annotated[int, Metric("Blocks sent to other engines.", "kv_transfer_sent")]
    sent_bytes: Annotated[int, Metric("Bytes of blocks sent to other engines.", "kv_transfer_sent_bytes")]
    num_turned_away: Annotated[
        int,
        Metric(
            "Refused connections of other engines: wrong token, model or protocol, too slow, or too many.",
            "kv_transfer_turned_away",
        ),
    ]
    num_starved: Annotated[
        int,
        Metric(
            "Connections of other engines that were not accepted, for lack of descriptors or threads.",
            "kv_transfer_starved",
        ),
    ]
    num_hits: Annotated[int, Metric("Blocks fetched from other engines and used.", "kv_transfer_hits")]
    num_misses: Annotated[int, Metric("Requested blocks that other engines did not have.", "kv_transfer_misses")]
    loaded_bytes: Annotated[int, Metric("Bytes of blocks fetched and used.", "kv_transfer_loaded_bytes")]
    load_s: Annotated[float, Metric("Time that prompts waited for other engines.", "kv_transfer_load_seconds")]
    num_late: Annotated[int, Metric("Timeouts of prompts that waited for another engine.", "kv_transfer_late")]
    num_refused: Annotated[int, Metric("Requests not sent, since the other engine had failed.", "kv_transfer_refused")]
    num_failures: Annotated[int, Metric("Failed requests to other engines.", "kv_transfer_failures")]
    num_damaged: Annotated[int, Metric("Blocks of other engines that failed verification.", "kv_transfer_damaged")]
