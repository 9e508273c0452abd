"""Counters of the hand-over of blocks between engines."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from quire.scheduling.stats import Metric


class TransferStats(NamedTuple):
    """Counters of the hand-over since the engine's start, and the present size of the exported blocks."""

    num_kept: Annotated[int, Metric("Blocks kept for other engines.", "kv_transfer_kept_blocks", "gauge")]
    kept_bytes: Annotated[int, Metric("Bytes of blocks kept for other engines.", "kv_transfer_kept_bytes", "gauge")]
    num_sent: Annotated[int, Metric("Blocks given to other engines.", "kv_transfer_sent")]
    sent_bytes: Annotated[int, Metric("Bytes of blocks given to other engines.", "kv_transfer_sent_bytes")]
    num_turned_away: Annotated[
        int,
        Metric(
            "Connections of other engines that were refused: token, model, protocol or number.",
            "kv_transfer_turned_away",
        ),
    ]
    num_hits: Annotated[int, Metric("Blocks fetched from other engines and used.", "kv_transfer_hits")]
    num_misses: Annotated[int, Metric("Blocks asked of other engines in vain.", "kv_transfer_misses")]
    loaded_bytes: Annotated[int, Metric("Bytes of blocks fetched and used.", "kv_transfer_loaded_bytes")]
    load_s: Annotated[float, Metric("Time that prompts waited for other engines.", "kv_transfer_load_seconds")]
    num_late: Annotated[int, Metric("Prompts that stopped waiting for another engine.", "kv_transfer_late")]
    num_refused: Annotated[
        int, Metric("Questions that were not asked: the other engine had failed.", "kv_transfer_refused")
    ]
    num_failures: Annotated[int, Metric("Questions to other engines that failed.", "kv_transfer_failures")]
    num_damaged: Annotated[
        int, Metric("Blocks of other engines that were not what they must be.", "kv_transfer_damaged")
    ]
