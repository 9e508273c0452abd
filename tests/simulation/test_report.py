"""The figures of simulations."""

from __future__ import annotations

import math
import random
import statistics
from itertools import accumulate, pairwise

import pytest

from quire.errors import ConfigError
from quire.measurement.simulation.fleet import FleetTotals
from quire.measurement.simulation.report import ServiceLevel, SimulationReport, difference, estimate, report_of, verdict
from quire.measurement.simulation.samples import GAP_RATIO, SimulationSamples

TOTALS = FleetTotals(
    num_replicas=2, num_used=1, num_steps=9, busy_s=5.0, num_preemptions=3, num_evictions=4, duration_s=10.0
)


def samples() -> SimulationSamples:
    made = SimulationSamples()
    made.add_request(0.0, 1.0, 2.0, 11, 100, 50)
    made.add_request(1.0, 1.5, 6.5, 11, 200, 0)
    made.add_request(2.0, 6.0, 6.0, 1, 100, 50)
    return made


def test_figures_of_a_run() -> None:
    report = report_of(samples(), TOTALS, ServiceLevel(ttft_s=1.0, tpot_s=0.2), 3.6)
    assert report.goodput == pytest.approx(1 / 3)
    assert report.good_request_rate == pytest.approx(0.1)
    assert (report.ttft_p50_s, report.ttft_p99_s) == (1.0, 4.0)
    # A single token has no time between tokens.
    assert (report.tpot_p50_s, report.tpot_p99_s) == (pytest.approx(0.1), pytest.approx(0.5))
    assert report.hit_rate == pytest.approx(0.25)
    assert report.output_tokens_per_s == pytest.approx(2.3)
    assert report.utilisation == pytest.approx(0.25)
    assert report.cost == pytest.approx(0.02)
    assert report.cost_per_million_tokens == pytest.approx(1e6 * 0.02 / 23)


def test_without_limits_every_request_that_ends_is_good_and_a_rejected_one_is_not() -> None:
    made = samples()
    made.num_rejected = 1
    assert report_of(made, TOTALS, ServiceLevel()).goodput == 0.75


def test_percentiles_of_gaps_are_at_most_a_percent_too_high() -> None:
    made, rng = SimulationSamples(), random.Random(1)
    gaps = [rng.lognormvariate(-4, 1) for _ in range(1001)]
    now_s = 0.0
    for gap in gaps[:500]:
        made.add_gap(gap)
    moments = []
    for gap in gaps[500:]:
        now_s += gap
        moments.append(now_s)
    made.add_gaps(0.0, moments, 1)
    for share in (0.5, 0.9, 0.99):
        exact = sorted(gaps)[math.ceil(share * len(gaps)) - 1]
        found = made.gap_percentile(share)
        assert found is not None
        assert exact <= found * (1 + 1e-9)
        assert found <= exact * GAP_RATIO * (1 + 1e-9)


@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.02, 2.0])
def test_gaps_of_several_moments_are_those_of_each(spread: float) -> None:
    rng = random.Random(2)
    moments = list(accumulate(0.01 * math.exp(rng.uniform(-spread, spread)) for _ in range(300)))
    together, each = SimulationSamples(), SimulationSamples()
    together.add_gaps(0.0, moments, 3)
    together.add_gaps(7.0, [], 3)
    for before_s, moment_s in pairwise([0.0, *moments]):
        each.add_gap(moment_s - before_s, 3)
    assert together.gaps == each.gaps


def test_an_interval_is_students() -> None:
    values = [1.0, 2.0, 4.0]
    mean, half_width = estimate(values)
    assert mean == pytest.approx(7 / 3)
    assert half_width == pytest.approx(4.303 * statistics.stdev(values) / math.sqrt(3))
    assert estimate([5.0]) == (5.0, math.inf)


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    rng = random.Random(7)
    held = 0
    for _ in range(2000):
        mean, half_width = estimate([rng.gauss(3.0, 1.0) for _ in range(5)])
        held += abs(mean - 3.0) <= half_width
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_a_verdict_takes_the_differences_of_pairs() -> None:
    def runs(*firsts: float) -> list[SimulationReport]:
        made = []
        for first in firsts:
            one = SimulationSamples()
            one.add_request(0.0, first, first + 1, 2, 10, 0)
            made.append(report_of(one, TOTALS, ServiceLevel()))
        return made

    slow, fast = runs(1.0, 5.0, 9.0), runs(0.9, 4.9, 8.85)
    gap = difference("ttft_p50_s", fast, slow)
    assert verdict("ttft_p50_s", gap) == "better"
    assert verdict("ttft_p50_s", difference("ttft_p50_s", slow, fast)) == "worse"
    assert verdict("ttft_p50_s", difference("ttft_p50_s", slow, slow)) == "no difference"
    assert verdict("ttft_p50_s", difference("ttft_p50_s", runs(1.0, 5.0, 9.0), runs(5.0, 1.0, 8.0))) == "no difference"
    assert verdict("hit_rate", difference("hit_rate", slow[:1], fast[:1])) == "one seed"


def test_limits_are_read() -> None:
    assert ServiceLevel.parse("ttft=500ms,tpot=0.05") == ServiceLevel(0.5, 0.05)
    assert ServiceLevel.parse("tpot=2s") == ServiceLevel(None, 2.0)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "itl=1", "ttft=1,ttft=2", "ttft=1h"]
)
def test_wrong_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="slo"):
        ServiceLevel.parse(text)
