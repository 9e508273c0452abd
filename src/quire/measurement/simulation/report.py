"""The results of simulations: of one run, and of several seeds with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from quire.errors import ConfigError, shown
from quire.measurement.simulation.fleet import FleetTotals
from quire.measurement.simulation.samples import SimulationSamples

# Factors of two-sided 95 % intervals by Student's t with 1, 2, ... degrees of freedom; beyond, the normal factor.
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL_95 = 1.960


class ServiceLevel(NamedTuple):
    """Time limits of a request, in seconds; None for no limit.

    Args:
        ttft_s: limit of the time to the first token.
        tpot_s: limit of the mean time between two tokens.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> ServiceLevel:
        """Parse a text such as "ttft=0.5,tpot=50ms".

        Raises:
            ConfigError: a limit is unknown, occurs twice, or is not a number above 0.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in ("ttft", "tpot") or name in limits:
                raise ConfigError(f"slo must be ttft=SECONDS, tpot=SECONDS, or both, got {shown(text)}", field="slo")
            number, factor = (value[:-2], 1e-3) if value.endswith("ms") else (value.removesuffix("s"), 1.0)
            try:
                seconds = float(number) * factor
            except ValueError:
                seconds = 0.0
            if not 0 < seconds < math.inf:
                raise ConfigError(f"slo: {name} must be a number of seconds above 0, got {shown(value)}", field="slo")
            limits[name] = seconds
        return cls(limits.get("ttft"), limits.get("tpot"))


NO_LIMITS = ServiceLevel()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """The results of one run. Times count from the arrival of a request; only requests that ended have times.

    A percentile of no values is NaN.

    Args:
        num_requests: number of requests that ended.
        num_rejected: number of requests that no replica could ever hold, or that are longer than the context.
        num_shortened: number of requests that were cut to the longest context.
        duration_s: seconds from the start to the end of the last request.
        request_rate, output_tokens_per_s: requests and new tokens per second of `duration_s`.
        goodput: share of all requests, including rejected ones, that ended within all time limits.
        good_request_rate: number of requests per second that ended within all time limits.
        ttft_p50_s, ttft_p90_s, ttft_p99_s: time to the first token.
        tpot_p50_s, tpot_p90_s, tpot_p99_s: mean time between the tokens of a request.
        itl_p50_s, itl_p99_s: time between two tokens, at most one percent too high.
        e2e_p50_s, e2e_p99_s: time to the last token.
        hit_rate: share of the prompt tokens that were in a prefix cache.
        num_preemptions, num_evictions: number of preemptions, and of evicted blocks.
        utilisation: share of the time in which a replica runs a step.
        cost: price of all replicas for the duration; 0 without a price.
        cost_per_million_tokens: price of a million new tokens.
    """

    num_requests: int
    num_rejected: int
    num_shortened: int
    duration_s: float
    request_rate: float
    output_tokens_per_s: float
    goodput: float
    good_request_rate: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    hit_rate: float
    num_preemptions: int
    num_evictions: int
    utilisation: float
    cost: float
    cost_per_million_tokens: float


def report_of(
    samples: SimulationSamples,
    totals: FleetTotals,
    level: ServiceLevel,
    price_per_hour: float = 0.0,
    *,
    num_too_long: int = 0,
    num_shortened: int = 0,
) -> SimulationReport:
    """Return the results of a run; the last two arguments are of its traffic, see `TrafficSource`."""
    ttft = [first - arrival for first, arrival in zip(samples.first_s, samples.arrivals_s, strict=True)]
    tpot = [
        (ended - first) / (count - 1) if count > 1 else 0.0
        for ended, first, count in zip(samples.ended_s, samples.first_s, samples.num_new, strict=True)
    ]
    e2e = [ended - arrival for ended, arrival in zip(samples.ended_s, samples.arrivals_s, strict=True)]
    num_good = sum(
        (level.ttft_s is None or first <= level.ttft_s) and (level.tpot_s is None or token <= level.tpot_s)
        for first, token in zip(ttft, tpot, strict=True)
    )
    several = [token for token, count in zip(tpot, samples.num_new, strict=True) if count > 1]
    num_new, num_prompt, duration_s = sum(samples.num_new), sum(samples.num_prompt), totals.duration_s or 1.0
    for values in (ttft, several, e2e):
        values.sort()
    num_rejected = samples.num_rejected + num_too_long
    cost = price_per_hour * totals.num_replicas * totals.duration_s / 3600
    return SimulationReport(
        num_requests=len(samples),
        num_rejected=num_rejected,
        num_shortened=num_shortened,
        duration_s=totals.duration_s,
        request_rate=len(samples) / duration_s,
        output_tokens_per_s=num_new / duration_s,
        goodput=num_good / max(1, len(samples) + num_rejected),
        good_request_rate=num_good / duration_s,
        ttft_p50_s=_ranked(ttft, 50),
        ttft_p90_s=_ranked(ttft, 90),
        ttft_p99_s=_ranked(ttft, 99),
        tpot_p50_s=_ranked(several, 50),
        tpot_p90_s=_ranked(several, 90),
        tpot_p99_s=_ranked(several, 99),
        itl_p50_s=_known(samples.gap_percentile(0.5)),
        itl_p99_s=_known(samples.gap_percentile(0.99)),
        e2e_p50_s=_ranked(e2e, 50),
        e2e_p99_s=_ranked(e2e, 99),
        hit_rate=sum(samples.num_cached) / num_prompt if num_prompt else 0.0,
        num_preemptions=totals.num_preemptions,
        num_evictions=totals.num_evictions,
        utilisation=totals.busy_s / (totals.num_replicas * duration_s),
        cost=cost,
        cost_per_million_tokens=1e6 * cost / num_new if num_new else 0.0,
    )


def _ranked(ordered: Sequence[float], percent: int) -> float:
    """Return a percentile: the smallest value that is not exceeded by `percent` of the values; NaN without values."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else math.nan


def _known(value: float | None) -> float:
    return math.nan if value is None else value


class Estimate(NamedTuple):
    """A mean over seeds, and half the width of its 95 % confidence interval; infinite for a single seed."""

    mean: float
    half_width: float


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its confidence interval by Student's t; NaN if any value is NaN."""
    if any(map(math.isnan, values)):
        return Estimate(math.nan, math.nan)
    mean, degrees = statistics.fmean(values), len(values) - 1
    if not degrees:
        return Estimate(mean, math.inf)
    factor = T_95[degrees - 1] if degrees <= len(T_95) else NORMAL_95
    return Estimate(mean, factor * statistics.stdev(values) / math.sqrt(len(values)))


FIGURES = tuple(field.name for field in fields(SimulationReport))
# Figures that are better if they are lower; the others in `JUDGED` are better if they are higher.
LOWER_IS_BETTER = frozenset(
    name for name in FIGURES if name.startswith(("ttft", "tpot", "itl", "e2e", "num_preempt", "cost_per"))
)
JUDGED = ("goodput", "output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "hit_rate")


def estimates_of(reports: Sequence[SimulationReport]) -> dict[str, Estimate]:
    """Return an estimate of each figure over the seeds."""
    return {name: estimate([getattr(report, name) for report in reports]) for name in FIGURES}


def difference(name: str, reports: Sequence[SimulationReport], others: Sequence[SimulationReport]) -> Estimate:
    """Return the difference of a figure between some runs and other runs with the same seeds.

    The runs of one seed serve the same requests, so the interval is estimated from the differences of pairs.
    """
    pairs = zip(reports, others, strict=True)
    return estimate([getattr(report, name) - getattr(other, name) for report, other in pairs])


def verdict(name: str, gap: Estimate) -> str:
    """Return "better" or "worse" if the interval of a difference excludes 0, else "no difference" or "one seed"."""
    if math.isnan(gap.mean):
        return "no difference"
    if math.isinf(gap.half_width) or abs(gap.mean) <= gap.half_width or not gap.mean:
        return "no difference" if not math.isinf(gap.half_width) else "one seed"
    return "better" if (gap.mean < 0) == (name in LOWER_IS_BETTER) else "worse"
