"""Counters of the remote prefix cache."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from quire.scheduling.stats import Metric


class RemoteStats(NamedTuple):
    """Counters of a remote store since the engine's start."""

    num_hits: Annotated[int, Metric("Blocks loaded from the remote store.", "prefix_cache_remote_hits")]
    num_misses: Annotated[
        int, Metric("Blocks that were asked of the remote store in vain.", "prefix_cache_remote_misses")
    ]
    loaded_bytes: Annotated[int, Metric("Bytes loaded from the remote store.", "prefix_cache_remote_loaded_bytes")]
    load_s: Annotated[
        float, Metric("Time that prompts waited for the remote store.", "prefix_cache_remote_load_seconds")
    ]
    num_late: Annotated[int, Metric("Prompts that stopped waiting for the remote store.", "prefix_cache_remote_late")]
    num_refused: Annotated[
        int,
        Metric("Prompts that did not ask the remote store: it had failed, or was busy.", "prefix_cache_remote_refused"),
    ]
    num_failures: Annotated[int, Metric("Calls of the remote store that failed.", "prefix_cache_remote_failures")]
    num_damaged: Annotated[
        int, Metric("Blocks of the remote store that were not as they were written.", "prefix_cache_remote_damaged")
    ]
    num_saved: Annotated[int, Metric("Blocks written to the remote store.", "prefix_cache_remote_saved")]
    num_dropped: Annotated[
        int,
        Metric(
            "Blocks that were not written to the remote store: too many waited, or it had failed.",
            "prefix_cache_remote_dropped",
        ),
    ]
    is_open: Annotated[
        int,
        Metric("1 while the remote store is left alone after failures.", "prefix_cache_remote_circuit_open", "gauge"),
    ]
