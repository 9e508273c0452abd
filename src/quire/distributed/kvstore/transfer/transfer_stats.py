"""Counters of KV transfer between engines."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from quire.scheduling.stats import Metric


class TransferStats(NamedTuple):
    """Counters of KV transfer since the engine's start, and the current size of the exported blocks."""

    num_kept: Annotated[int, Metric("Blocks kept for other engines.", "kv_transfer_kept_blocks", "gauge")]
    kept_bytes: Annotated[int, Metric("Bytes of blocks kept for other engines.", "kv_transfer_kept_bytes", "gauge")]
    num_sent: Annotated[int, Metric("Blocks sent to other engines.", "kv_transfer_sent")]
    sent_bytes: Annotated[int, Metric("Bytes of blocks sent to other engines.", "kv_transfer_sent_bytes")]
    num_turned_away: Annotated[
        int,
        Metric(
            "Refused connections of other engines: wrong token, model or protocol, or too many.",
            "kv_transfer_turned_away",
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
