"""Counters of the remote prefix cache."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from quire.scheduling.stats import Metric


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
