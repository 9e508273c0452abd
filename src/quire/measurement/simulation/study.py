"""Studies: traffic under several settings and seeds, and the search for the largest rate or the fewest replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from quire.errors import ConfigError, shown
from quire.measurement.simulation.fleet import SimulatedFleet
from quire.measurement.simulation.hand_over import PrefillSplit
from quire.measurement.simulation.replicas.replica_settings import ReplicaSettings
from quire.measurement.simulation.replicas.step_time import StepTimeModel
from quire.measurement.simulation.report import NO_LIMITS, ServiceLevel, SimulationReport, report_of
from quire.measurement.simulation.routers import ROUTERS
from quire.measurement.simulation.traffic import TrafficSource

MAX_REPLICAS = 1_000_000
# Maximum ratio of the largest rate that is tried to the first one, and of the first one to the smallest.
MAX_RATE_FACTOR = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All inputs of a run except the seed.

    Args:
        settings: options of each replica.
        step_time: model of the seconds of a step.
        traffic: function from a seed to the requests.
        num_replicas: number of replicas.
        routing: name in `ROUTERS`.
        split: split of prefill and decoding; None if each replica does both.
        level: time limits.
        price_per_hour: price of a replica for an hour.

    Raises:
        ConfigError: a value is not allowed.
    """

    settings: ReplicaSettings
    step_time: StepTimeModel
    traffic: Callable[[int], TrafficSource]
    num_replicas: int = 1
    routing: str = "round_robin"
    split: PrefillSplit | None = None
    level: ServiceLevel = NO_LIMITS
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if type(self.num_replicas) is not int or not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise ConfigError(
                f"replicas must be a whole number from 1 to {MAX_REPLICAS}, got {shown(self.num_replicas)}",
                field="replicas",
            )
        if self.routing not in ROUTERS:
            raise ConfigError(
                f"routing must be one of {', '.join(ROUTERS)}, got {shown(self.routing)}", field="routing"
            )

    def fleet(self, traffic: TrafficSource, *, can_leap: bool = True) -> SimulatedFleet:
        """Return the fleet that serves some traffic."""
        router = ROUTERS[self.routing]()
        return SimulatedFleet(
            self.settings,
            self.step_time,
            router,
            self.num_replicas,
            follow_up=traffic.follow_up,
            can_leap=can_leap,
            split=self.split,
            decode_router=None if self.split is None else ROUTERS[self.routing](),
        )

    def run(self, seed: int) -> SimulationReport:
        """Simulate the traffic of a seed."""
        traffic = self.traffic(seed)
        fleet = self.fleet(traffic)
        totals = fleet.run(traffic.requests())
        return report_of(
            fleet.samples,
            totals,
            self.level,
            self.price_per_hour,
            num_too_long=traffic.num_too_long,
            num_shortened=traffic.num_shortened,
        )

    def run_all(self, seeds: Sequence[int]) -> list[SimulationReport]:
        """Simulate the traffic of each seed."""
        return [self.run(seed) for seed in seeds]


class Trial(NamedTuple):
    """A value that a search has tried, and the share of requests within the time limits, on average over seeds."""

    value: float
    goodput: float
    reports: list[SimulationReport]


class SearchResult(NamedTuple):
    """The result of a search.

    Args:
        best: the best value that suffices, or None.
        trials: all trials, in order.
    """

    best: Trial | None
    trials: list[Trial]


def find_rate(
    scenario_of: Callable[[float], Scenario], first: float, seeds: Sequence[int], share: float, precision: float = 0.02
) -> SearchResult:
    """Find the largest rate at which a share of the requests keeps the time limits, by bisection.

    The search assumes that goodput falls with the rate; if it does not, a larger rate may suffice too.

    Args:
        scenario_of: function from a rate to a scenario.
        first: first rate to try.
        seeds: seeds of every trial.
        share: share of the requests that must keep the limits.
        precision: maximum ratio, less 1, of the last rate that does not suffice to the last one that does.
    """
    trials: list[Trial] = []

    def suffices(rate: float) -> bool:
        trials.append(_try(rate, scenario_of(rate), seeds))
        return trials[-1].goodput >= share

    low = high = first
    if suffices(first):
        while high < first * MAX_RATE_FACTOR and (high == low or suffices(high)):
            low, high = high, 2 * high
        if trials[-1].goodput >= share:
            return SearchResult(trials[-1], trials)
    else:
        while not suffices(low / 2):
            low /= 2
            if low < first / MAX_RATE_FACTOR:
                return SearchResult(None, trials)
        low, high = low / 2, low
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if suffices(middle):
            low = middle
        else:
            high = middle
    return SearchResult(next(trial for trial in trials if trial.value == low), trials)


def find_replicas(
    scenario_of: Callable[[int], Scenario], seeds: Sequence[int], share: float, most: int
) -> SearchResult:
    """Find the smallest number of replicas with which a share of the requests keeps the time limits, by bisection.

    Args:
        scenario_of: function from a number of replicas to a scenario.
        seeds: seeds of every trial.
        share: share of the requests that must keep the limits.
        most: maximum number of replicas to try.
    """
    trials: list[Trial] = []

    def suffices(count: int) -> bool:
        trials.append(_try(count, scenario_of(count), seeds))
        return trials[-1].goodput >= share

    high = 1
    while not suffices(high):
        if high == most:
            return SearchResult(None, trials)
        high = min(2 * high, most)
    low = int(max((trial.value for trial in trials[:-1]), default=0))
    while high - low > 1:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return SearchResult(next(trial for trial in trials if trial.value == high), trials)


def _try(value: float, scenario: Scenario, seeds: Sequence[int]) -> Trial:
    reports = scenario.run_all(seeds)
    return Trial(value, fmean(report.goodput for report in reports), reports)
