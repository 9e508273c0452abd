"""Prometheus metrics of the prefix cache on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.execution.prefix_store import StoreStats

GAUGES = {
    "num_blocks": ("blocks", "Blocks of this model on disk."),
    "num_bytes": ("bytes", "Bytes of the disk that blocks take, those of other models included."),
    "num_foreign": ("foreign_blocks", "Blocks of other models or layouts on disk."),
}
COUNTERS = {
    "num_hits": ("hits", "Blocks loaded from disk."),
    "num_misses": ("misses", "Blocks that were asked for in vain."),
    "loaded_bytes": ("loaded_bytes", "Bytes loaded from disk."),
    "load_s": ("load_seconds", "Time that loads took."),
    "num_saved": ("saved", "Blocks written to disk."),
    "num_deleted": ("deleted", "Blocks deleted to make room for others."),
    "num_dropped": ("dropped", "Blocks that were not written: too many waited, or there was no room."),
    "num_damaged": ("damaged", "Blocks and files that were not as they were written."),
    "num_full": ("full", "Writes for which there was no room."),
}


class StoreCollector(Collector):
    """Reads the store's counters when metrics are asked for.

    Args:
        stats: returns them.
        model_name: value of the label `model_name`.
        prefix: what stands before the colon of each name.
    """

    def __init__(self, stats: Callable[[], StoreStats | None], model_name: str, prefix: str = "vllm") -> None:
        self._stats = stats
        self._labels = [model_name]
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield each metric."""
        stats = self._stats()
        if stats is None:
            return
        for field, (name, meaning) in GAUGES.items():
            gauge = GaugeMetricFamily(self._full(name), meaning, labels=["model_name"])
            gauge.add_metric(self._labels, getattr(stats, field))
            yield gauge
        for field, (name, meaning) in COUNTERS.items():
            counter = CounterMetricFamily(self._full(name), meaning, labels=["model_name"])
            counter.add_metric(self._labels, getattr(stats, field))
            yield counter

    def _full(self, name: str) -> str:
        return f"{self._prefix}:prefix_cache_disk_{name}"
