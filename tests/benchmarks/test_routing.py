"""The benchmark of routers over simulated replicas: its figures are the same again, and keep the marks."""

from __future__ import annotations

import pytest

from benchmarks.routing import run_simulated, shapes
from benchmarks.routing_traces import make_trace


@pytest.mark.slow
def test_figures_of_a_short_trace_are_the_same_again_and_better_than_those_of_others() -> None:
    shape = shapes(60)["chat, 6 turns"]
    found = run_simulated(shape)
    assert found == run_simulated(shape)
    quire = found["quire"]
    assert quire.num_requests == found["round robin"].num_requests > 300
    assert found["one big cache"].hit_share - quire.hit_share < 0.05
    assert quire.hit_share > found["round robin"].hit_share + 0.2
    assert quire.mean_ttft_s < found["round robin"].mean_ttft_s


def test_traces_have_the_turns_that_they_are_named_for() -> None:
    chat = make_trace(shapes(200)["chat, 6 turns"], 1000, 1)
    assert {len(session.turns) for session in chat} == {6}
    agents = sorted(len(session.turns) for session in make_trace(shapes(200)["agents, median of 43 turns"], 1000, 1))
    assert 35 <= agents[len(agents) // 2] <= 50
