"""The proxy's metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.fleet.routing.breaker import BreakerState

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class ProxyMetrics:
    """Counters of requests, and gauges with the servers' state at the time of reading."""

    def __init__(
        self,
        states: Callable[[], Mapping[str, Mapping[str, Any]]],
        forwarding: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "quire_router_requests", "Requests by server and end.", ("replica", "end"), registry=self.registry
        )
        self.retries = Counter(
            "quire_router_retries",
            "Requests that were sent to another server, by the end of the attempt before.",
            ("after",),
            registry=self.registry,
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
        self.registry.register(_FleetCollector(states, forwarding))

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    """The state of the servers, of retries and of suspects."""

    GAUGES = (
        ("is_available", "available", "1 where the server takes requests."),
        ("num_in_flight", "in_flight", "Requests on the server that have not ended."),
        ("queue_s", "queue_seconds", "Expected time until another prompt would begin."),
        ("num_blocks", "known_blocks", "Blocks that the server is known to hold."),
        ("num_gaps", "event_gaps", "Gaps in the server's KV events so far."),
    )
    TOTALS = (
        ("num_retries_refused", "retry_budget_exhausted", "Retries that the budget did not allow."),
        ("num_suspects", "suspects", "Requests that were in flight, without output, when their server was lost."),
        ("num_suspects_refused", "suspects_refused", "Requests that were refused because servers were lost with them."),
    )

    def __init__(
        self, states: Callable[[], Mapping[str, Mapping[str, Any]]], forwarding: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._states = states
        self._forwarding = forwarding

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the values exist only on the event loop."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        states, forwarding = self._states(), self._forwarding()
        for key, name, text in self.GAUGES:
            family = GaugeMetricFamily(f"quire_router_{name}", text, labels=("replica",))
            for replica, state in states.items():
                family.add_metric((replica,), float(state[key]))
            yield family
        for key, name, text in self.TOTALS:
            if key in forwarding:
                yield CounterMetricFamily(f"quire_router_{name}", text, value=float(forwarding[key]))
        breakers = GaugeMetricFamily(
            "quire_router_breaker", "1 for the state of the server's breaker.", labels=("replica", "state")
        )
        ejections = CounterMetricFamily("quire_router_ejections", "Ejections of the server.", labels=("replica",))
        for replica, state in states.items():
            if "breaker" in state:
                for value in BreakerState:
                    breakers.add_metric((replica, value.value), float(state["breaker"] == value.value))
                ejections.add_metric((replica,), float(state["num_ejections"]))
        yield breakers
        yield ejections
