"""Prometheus metrics of the KV memory, read from its own counts whenever they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.engine.engine import Engine
from quire.engine.residency import BOUNDS_S, Spans


class KvMetrics(Collector):
    """Shows an engine's blocks and what happened to them; nothing is counted for it while the engine steps.

    Args:
        engine: looked at from any thread.
        model_name: value of the label `model_name`.
        prefix: what stands before the colon of each name.
    """

    def __init__(self, engine: Engine, model_name: str, prefix: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        usage = self._engine.usage()
        blocks = GaugeMetricFamily(
            f"{self._prefix}:kv_blocks",
            "Blocks by cache group, tier and state: used, idle (free to reuse and to evict) or free.",
            labels=["model_name", "group", "tier", "state"],
        )
        for tier, groups in (("device", usage.groups), ("host", usage.host.groups if usage.host else ())):
            for idx, group in enumerate(groups):
                for state in ("used", "idle", "free"):
                    blocks.add_metric([self._model_name, str(idx), tier, state], getattr(group, state))
        yield blocks
        yield self._counter("kv_block_evictions", "Published blocks taken back for reuse.", usage.num_evictions)
        yield self._counter("kv_block_copies", "Blocks copied on write.", usage.num_copies)
        yield self._counter("kv_block_merges", "Duplicate blocks given back when they filled.", usage.num_merges)
        yield self._gauge("kv_saved_bytes", "Bytes that sharing saves among what is held.", usage.saved_bytes)
        retention = self._engine.scheduler.memory.arena.retention
        yield self._gauge("kv_pinned_blocks", "Blocks, or slabs, that pins fill.", self._engine.pins.report().filled)
        yield self._gauge("kv_retained_bytes", "Bytes of blocks that are to be evicted last.", retention.num_bytes)
        residency = self._engine.residency
        if residency is not None:
            yield self._histogram("kv_block_lifetime_seconds", "Taken to evicted, sampled.", residency.lifetime)
            yield self._histogram("kv_block_idle_before_evict_seconds", "Idle to evicted, sampled.", residency.idle)
            yield self._histogram("kv_block_reuse_gap_seconds", "Idle to hit again, sampled.", residency.reuse_gap)

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", meaning, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", meaning, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _histogram(self, name: str, meaning: str, spans: Spans) -> Metric:
        family = HistogramMetricFamily(f"{self._prefix}:{name}", meaning, labels=["model_name"])
        buckets, total = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), tuple(spans.counts), strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([self._model_name], buckets, spans.sum_s)
        return family
