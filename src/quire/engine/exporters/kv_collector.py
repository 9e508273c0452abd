"""Prometheus metrics of the KV memory and of LoRA adapters, read from an engine at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.distributed.kvstore.counters import RemoteStats, StoreStats, TransferStats
from quire.engine.engine import Engine
from quire.engine.metrics.block_lifetimes import BOUNDS_S, TimeHistogram
from quire.engine.metrics.stats import EngineStats, StepStats
from quire.execution.step.image_features import ImageStats
from quire.scheduling.stats import Metric as Declaration
from quire.scheduling.stats import metrics_of
from quire.sequences.status import SequenceStatus

# Greatest number of adapter names in a label value; the last ones in alphabetical order are left out.
MAX_NAMES = 64
LABELS = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
# `Metrics` counts the fields of `StepStats` step by step.
NOT_IN_STEPS = {name: metric for name, metric in metrics_of(EngineStats).items() if name not in metrics_of(StepStats)}


class KvMetrics(Collector):
    """Exports an engine's blocks, stores, KV transfer and images, and the counters that its steps do not report."""

    def __init__(self, engine: Engine, model_name: str, prefix: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        usage, stats = self._engine.usage(), self._engine.stats
        blocks = GaugeMetricFamily(
            f"{self._prefix}:kv_blocks",
            "KV cache blocks by cache group, tier and state: used, idle (cached and evictable) or free.",
            labels=["model_name", "group", "tier", "state"],
        )
        for tier, groups in (("device", usage.groups), ("host", usage.host.groups if usage.host else ())):
            for idx, group in enumerate(groups):
                for state in ("used", "idle", "free"):
                    blocks.add_metric([self._model_name, str(idx), tier, state], getattr(group, state))
        yield blocks
        yield from self._declared(stats, NOT_IN_STEPS)
        yield self._gauge("kv_saved_bytes", "Bytes saved by sharing among sequences and pins.", usage.saved_bytes)
        retention = self._engine.scheduler.memory.arena.retention
        yield self._gauge("kv_pinned_blocks", "Pinned blocks, or slabs.", self._engine.pins.report().filled)
        yield self._gauge("kv_retained_bytes", "Bytes of blocks of high retention priority.", retention.num_bytes)
        lifetimes = self._engine.block_lifetimes
        if lifetimes is not None:
            for name, meaning, times in (
                ("kv_block_lifetime_seconds", "Allocation to eviction of a block, sampled.", lifetimes.lifetime),
                ("kv_block_idle_before_evict_seconds", "Idle time before eviction, sampled.", lifetimes.idle),
                ("kv_block_reuse_gap_seconds", "Idle time of a block before a hit, sampled.", lifetimes.reuse_gap),
            ):
                yield time_histogram(f"{self._prefix}:{name}", meaning, self._model_name, times)
        for counters, declared in (
            (stats.disk, StoreStats),
            (stats.remote, RemoteStats),
            (stats.transfer, TransferStats),
            (stats.images, ImageStats),
        ):
            if counters is not None:
                yield from self._declared(counters, metrics_of(declared))

    def _declared(self, stats: object, declared: Mapping[str, Declaration]) -> Iterator[Metric]:
        for field_name, metric in declared.items():
            if metric.name is not None:
                show = self._gauge if metric.kind == "gauge" else self._counter
                yield show(metric.name, metric.help, getattr(stats, field_name))

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", meaning, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", meaning, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def time_histogram(name: str, meaning: str, model_name: str, times: TimeHistogram) -> Metric:
    """Return a histogram of times as a metric with the label `model_name`."""
    family = HistogramMetricFamily(name, meaning, labels=["model_name"])
    buckets, total = [], 0
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), tuple(times.counts), strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric([model_name], buckets, times.sum_s)
    return family


class LoraMetrics(Collector):
    """Exports the adapters of running and waiting requests: one sample, whose value is the time of the scrape.

    The labels of earlier scrapes are not kept, and names are those of the operator's adapters.
    """

    def __init__(self, engine: Engine, prefix: str, clock: Callable[[], float] = time.time) -> None:
        self._engine, self._name, self._clock = engine, f"{prefix}:lora_requests_info", clock

    def collect(self) -> Iterator[Metric]:
        """Yield the metric; nothing if the engine has no adapters."""
        adapters = self._engine.adapters
        if adapters is None:
            return
        # Where one adapter has several names, the first name that was loaded is shown.
        names = {adapter.slot: adapter.name for adapter in reversed(adapters.loaded)}
        running, waiting = set[str](), set[str]()
        for request in tuple(self._engine.scheduler.requests.values()):
            name = None if request.adapter is None else names.get(request.adapter)
            if name is not None:
                is_running = any(sequence.status is SequenceStatus.RUNNING for sequence in tuple(request.sequences))
                (running if is_running else waiting).add(name)
        family = GaugeMetricFamily(
            self._name, "Adapters of running and waiting requests; the value is the time.", labels=LABELS
        )
        family.add_metric([*map(_joined, (running, waiting)), str(adapters.limit)], self._clock())
        yield family


def _joined(names: set[str]) -> str:
    return ",".join(sorted(names)[:MAX_NAMES])
