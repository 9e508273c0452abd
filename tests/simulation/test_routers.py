"""The router's real core before simulated replicas: what it knows is what their memories hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.measurement.simulation.fleet import SimulatedFleet
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.routers import KVEventRouter
from quire.measurement.simulation.routing import RouterView
from quire.measurement.simulation.traffic import SyntheticTraffic, TrafficShape
from tests.simulation.fleets import settings, step_time

SHAPE = TrafficShape(
    num_requests=60, turns=6, rate=8.0, think_s=2.0, input_len=40, input_sigma=0.5, output_len=24, system_len=40
)


class Comparing(KVEventRouter):
    """A router that compares each expected hit with the answer of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.hits: list[int] = []

    def choose(self, request: SimulatedRequest, view: RouterView, now_s: float) -> int:
        idx = super().choose(request, view, now_s)
        expected = self._routes[request.output_stream].hit.num_tokens
        assert expected == view.hit_tokens(idx)
        self.hits.append(expected)
        return idx


@pytest.mark.parametrize("can_leap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_expected_hits_are_those_of_the_memories(can_leap: bool) -> None:
    traffic, router = SyntheticTraffic(SHAPE, 3), Comparing()
    fleet = SimulatedFleet(settings(2000), step_time(), router, 4, follow_up=traffic.follow_up, can_leap=can_leap)
    fleet.run(traffic.requests())
    assert len(router.hits) == len(fleet.samples) > 40
    assert sum(router.hits) > 0.5 * sum(fleet.samples.num_prompt)
    assert not router._routes


def test_what_is_evicted_is_known_after_the_step() -> None:
    # Without a beginning in common, sessions go to several replicas.
    traffic, router = SyntheticTraffic(replace(SHAPE, system_len=0), 4), KVEventRouter()
    fleet = SimulatedFleet(settings(60), step_time(), router, 3, follow_up=traffic.follow_up)
    totals = fleet.run(traffic.requests())
    assert totals.num_evictions > 100
    assert totals.num_used > 1
    for idx, replica in enumerate(fleet._replicas):
        if replica is None:
            continue
        # All steps have ended: nothing is on its way.
        index = replica.memory.groups[0].pool.index
        assert router.router.num_blocks(str(idx)) == len(index.block_ids())
