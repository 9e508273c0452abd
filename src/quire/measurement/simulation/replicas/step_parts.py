"""Conversion of a planned step to the inputs of a step time model."""

from __future__ import annotations

from collections.abc import Sequence

from quire.measurement.simulation.replicas.step_time import StepItem, shared_tokens
from quire.memory.manager import KVCacheManager
from quire.scheduling.plan import ScheduledSequence


def parts_of(items: Sequence[ScheduledSequence], memory: KVCacheManager) -> list[StepItem]:
    """Return the items of a planned step, for a step time model."""
    states = memory.sequences
    tables = [(states[item.seq_id].tables[0], item.start) for item in items]
    num_shared = shared_tokens(tables, memory.block_size)
    new = tuple.__new__  # the same as the class, without a Python call
    return [
        new(StepItem, (item.start, len(item.token_ids), 1 if item.num_samples else 0, shared))
        for item, shared in zip(items, num_shared, strict=True)
    ]
