"""Searches for a rate or a number of replicas, and routing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.measurement.simulation.chart import draw_search, draw_variants
from quire.measurement.simulation.fleet import SimulatedFleet
from quire.measurement.simulation.report import ServiceLevel
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.routing import PrefixAware, ReplicaLoads, RoundRobin, RouterView
from quire.measurement.simulation.study import Scenario, find_rate, find_replicas
from quire.measurement.simulation.traffic import SyntheticTraffic, TrafficShape, TrafficSource
from quire.memory.manager import KVCacheManager
from tests.simulation.fleets import one_request, settings, step_time

SHAPE = TrafficShape(num_requests=60, input_len=64, output_len=16, rate=4.0, burstiness=0.0)


def traffic_of(**changes: Any) -> Callable[[int], TrafficSource]:
    values = {name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}
    return lambda seed: SyntheticTraffic(TrafficShape(**{**values, **changes}), seed)


def scenario(**changes: Any) -> Scenario:
    shape = changes.pop("shape", {})
    fields = {"settings": settings(400), "step_time": step_time(step=0.05), "level": ServiceLevel(ttft_s=0.2)}
    return Scenario(**{**fields, "traffic": traffic_of(**shape), **changes})


def test_a_rate_is_found_that_suffices_and_a_larger_one_that_does_not() -> None:
    one_at_a_time = settings(400, max_num_seqs=1)
    found = find_rate(lambda rate: scenario(settings=one_at_a_time, shape={"rate": rate}), 4.0, (0, 1), 0.9)
    # A request alone takes 16 steps of 50 ms: at most 1.25 a second, a little more where few of 60 may wait.
    assert found.best is not None
    assert 1.2 < found.best.value < 1.5
    assert found.best.goodput >= 0.9
    above = [trial for trial in found.trials if trial.value > found.best.value]
    assert above
    assert all(trial.goodput < 0.9 for trial in above)
    assert min(trial.value for trial in above) < 1.03 * found.best.value
    assert draw_search("rate", found).count("<circle") == len(found.trials)


def test_a_rate_above_the_first_one_is_found_too() -> None:
    one_at_a_time = settings(400, max_num_seqs=1)
    found = find_rate(lambda rate: scenario(settings=one_at_a_time, shape={"rate": rate}), 0.1, (0,), 0.9)
    assert found.best is not None
    assert 1.2 < found.best.value < 1.5


def test_no_rate_is_found_where_a_single_request_is_too_slow() -> None:
    found = find_rate(lambda rate: scenario(level=ServiceLevel(ttft_s=0.01), shape={"rate": rate}), 4.0, (0,), 0.9)
    assert found.best is None


def test_the_fewest_replicas_are_found() -> None:
    one_at_a_time = settings(400, max_num_seqs=1)

    def of(count: int) -> Scenario:
        return scenario(settings=one_at_a_time, num_replicas=count, routing="least_loaded", shape={"rate": 8.0})

    found = find_replicas(of, (0,), 0.95, 100)
    assert found.best is not None
    best = int(found.best.value)
    assert of(best).run(0).goodput >= 0.95
    assert of(best - 1).run(0).goodput < 0.95
    assert find_replicas(of, (0,), 0.95, best - 1).best is None


def test_the_router_that_knows_the_cache_hits_more_than_the_others() -> None:
    shape = {"num_requests": 400, "turns": 8, "rate": 8.0, "think_s": 2.0, "system_len": 64, "burstiness": 1.0}
    hit_rates = {
        routing: scenario(num_replicas=4, routing=routing, shape=shape, settings=settings(800)).run(3).hit_rate
        for routing in ("round_robin", "least_loaded", "prefix_aware")
    }
    assert hit_rates["prefix_aware"] > 0.8
    assert hit_rates["prefix_aware"] > hit_rates["least_loaded"] + 0.1
    assert hit_rates["prefix_aware"] > hit_rates["round_robin"] + 0.1


class Noting(RoundRobin):
    """A router that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int]] = []

    def choose(self, request: SimulatedRequest, view: RouterView, now_s: float) -> int:
        assert len(view.token_ids()) == request.num_prompt
        return super().choose(request, view, now_s)

    def on_replica(self, idx: int, memory: KVCacheManager) -> None:
        assert memory.usage().used == 0
        self.told.append(("replica", idx))

    def on_first_token(self, request: SimulatedRequest, idx: int, now_s: float) -> None:
        assert now_s > request.arrival_s
        self.told.append(("first token", idx))

    def on_end(self, request: SimulatedRequest, idx: int, now_s: float) -> None:
        assert now_s >= request.arrival_s
        self.told.append(("end", idx))


def test_a_router_is_told_of_replicas_first_tokens_and_ends() -> None:
    router = Noting()
    fleet = SimulatedFleet(settings(100), step_time(), router, 3)
    fleet.run([one_request(20, 5), one_request(16 * 100, 1, 1.0, stream=3), one_request(20, 1, 2.0, stream=5)])
    assert router.told == [
        ("replica", 0),
        ("first token", 0),
        ("end", 0),
        ("replica", 1),
        ("end", 1),  # rejected
        ("replica", 2),
        ("first token", 2),
        ("end", 2),
    ]


def test_a_router_that_knows_beginnings_forgets_the_oldest() -> None:
    router = PrefixAware(max_candidates=2, max_beginnings=3)
    fleet = SimulatedFleet(settings(400), step_time(), router, 4)
    fleet.run([one_request(20, 2, float(idx), stream=2 * idx + 1) for idx in range(9)])
    assert len(router._known) == 3


def test_a_run_depends_on_its_seed_alone() -> None:
    assert scenario().run(1) == scenario().run(1)


def test_the_least_loaded_replica_is_the_first_of_those_with_the_fewest() -> None:
    loads = ReplicaLoads(3)
    assert loads.least() == 0
    loads.set(0, 2)
    assert loads.least() == 1
    loads.set(1, 3)
    loads.set(2, 2)
    assert loads.least() == 0
    loads.set(2, 1)
    loads.set(2, 5)
    loads.set(0, 4)
    assert loads.least() == 1


def test_the_least_loaded_replica_is_found_after_every_change() -> None:
    loads, counts, rng = ReplicaLoads(7), [0] * 7, random.Random(3)
    for _ in range(2000):
        idx = rng.randrange(7)
        counts[idx] = max(0, counts[idx] + rng.choice((-1, 1, 1, -2)))
        loads.set(idx, counts[idx])
        if rng.random() < 0.7:
            assert loads.least() == counts.index(min(counts))


def test_a_chart_has_a_bar_for_each_variant_and_escapes_names() -> None:
    reports = scenario().run_all((0, 1))
    chart = draw_variants({"a<b": reports, "c": reports})
    assert "a&lt;b" in chart
    assert chart.startswith("<svg")
    assert chart.count("<rect") == 1 + 2 * 6


@pytest.mark.parametrize("changes", [{"num_replicas": 0}, {"num_replicas": 1 << 30}, {"routing": "random"}])
def test_a_wrong_scenario_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        scenario(**changes)
