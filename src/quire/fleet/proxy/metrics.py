"""The proxy's metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class ProxyMetrics:
    """Counters of requests, and gauges with the servers' state at the time of reading."""

    def __init__(self, states: Callable[[], Mapping[str, Mapping[str, Any]]]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "quire_router_requests", "Requests by server and end.", ("replica", "end"), registry=self.registry
        )
        self.retries = Counter(
            "quire_router_retries", "Requests that were sent to another server.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "quire_router_prompt_tokens", "Tokens of the prompts that were routed.", registry=self.registry
        )
        self.hit_tokens = Counter(
            "quire_router_expected_hit_tokens", "Tokens that were expected in the cache.", registry=self.registry
        )
        self.choose_s = Histogram(
            "quire_router_choose_seconds",
            "Time to find the tokens of a prompt and to choose a server.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(_FleetCollector(states))

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    """Gauges of the servers."""

    GAUGES = (
        ("is_available", "available", "1 where the server takes requests."),
        ("num_in_flight", "in_flight", "Requests on the server that have not ended."),
        ("queue_s", "queue_seconds", "Expected time until another prompt would begin."),
        ("num_blocks", "known_blocks", "Blocks that the server is known to hold."),
        ("num_gaps", "event_gaps", "Gaps in the server's KV events so far."),
    )

    def __init__(self, states: Callable[[], Mapping[str, Mapping[str, Any]]]) -> None:
        self._states = states

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the values exist only on the event loop."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        states = self._states()
        for key, name, text in self.GAUGES:
            family = GaugeMetricFamily(f"quire_router_{name}", text, labels=("replica",))
            for replica, state in states.items():
                family.add_metric((replica,), float(state[key]))
            yield family
