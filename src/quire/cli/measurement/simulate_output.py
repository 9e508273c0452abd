"""The text of `quire simulate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.measurement.simulation.report import (
    JUDGED,
    NO_LIMITS,
    Estimate,
    ServiceLevel,
    SimulationReport,
    difference,
    estimates_of,
    verdict,
)
from quire.measurement.simulation.study import SearchResult

NONE_SERVED = "No request was served, so there are no figures"
# Figure -> its title and its format.
TITLES = {
    "goodput": ("goodput", "share"),
    "good_request_rate": ("good requests/s", "number"),
    "request_rate": ("requests/s", "number"),
    "output_tokens_per_s": ("new tokens/s", "number"),
    "ttft_p50_s": ("first token, p50", "time"),
    "ttft_p90_s": ("first token, p90", "time"),
    "ttft_p99_s": ("first token, p99", "time"),
    "tpot_p50_s": ("per output token, p50", "time"),
    "tpot_p90_s": ("per output token, p90", "time"),
    "tpot_p99_s": ("per output token, p99", "time"),
    "itl_p50_s": ("between tokens, p50", "time"),
    "itl_p99_s": ("between tokens, p99", "time"),
    "e2e_p50_s": ("whole answer, p50", "time"),
    "e2e_p99_s": ("whole answer, p99", "time"),
    "hit_rate": ("prefix hit rate", "share"),
    "utilisation": ("utilisation", "share"),
    "num_preemptions": ("preemptions", "number"),
    "num_evictions": ("evicted blocks", "number"),
    "cost": ("cost", "number"),
    "cost_per_million_tokens": ("cost of 1M new tokens", "number"),
}


def shown_value(value: float, kind: str) -> str:
    """Return a figure as text."""
    if math.isnan(value):
        return "none"
    if kind == "share":
        return f"{100 * value:.1f}%"
    if kind == "time":
        return f"{1e3 * value:,.1f} ms" if value < 10 else f"{value:,.1f} s"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.3g}"


def shown_estimate(value: Estimate, kind: str) -> str:
    """Return a mean over seeds with half the width of its confidence interval."""
    text = shown_value(value.mean, kind)
    return text if not math.isfinite(value.half_width) else f"{text} ± {shown_value(value.half_width, kind)}"


def report_lines(reports: Sequence[SimulationReport], level: ServiceLevel, price: float) -> list[str]:
    """Return the lines of one variant."""
    first, means = reports[0], estimates_of(reports)
    seeds = "one seed" if len(reports) == 1 else f"means of {len(reports)} seeds, with intervals of 95 %"
    lines = [f"{first.num_requests:,} requests in {first.duration_s:,.1f} simulated seconds; {seeds}"]
    lines += count_lines(reports)
    if not any(report.num_requests for report in reports):
        return [*lines, "", NONE_SERVED]
    skipped = set() if price else {"cost", "cost_per_million_tokens"}
    if level == NO_LIMITS:
        skipped |= {"goodput", "good_request_rate"}
    rows = [(title, shown_estimate(means[name], kind)) for name, (title, kind) in TITLES.items() if name not in skipped]
    width = max(len(title) for title, _ in rows)
    return [*lines, "", *(f"  {title:<{width}}  {text}" for title, text in rows)]


def count_lines(reports: Sequence[SimulationReport]) -> list[str]:
    """Return the lines about requests that were served shorter than they were asked for, or not at all."""
    rejected = sum(report.num_rejected for report in reports)
    shortened = sum(report.num_shortened for report in reports)
    total = rejected + sum(report.num_requests for report in reports)
    lines = []
    if shortened:
        lines.append(f"{shortened:,} of {total:,} requests were shortened: they exceeded the longest context")
    if rejected:
        lines.append(
            f"{rejected:,} of {total:,} requests were rejected: the KV memory of a replica can never hold them, or the "
            "context has no room for a new token"
        )
    return lines


def comparison_lines(results: Mapping[str, Sequence[SimulationReport]]) -> list[str]:
    """Return a table of all variants, and their differences from the first one."""
    names, base = list(results), next(iter(results.values()))
    means = {name: estimates_of(reports) for name, reports in results.items()}
    rows = [("", *names)]
    rows += [
        (TITLES[figure][0], *(shown_estimate(means[name][figure], TITLES[figure][1]) for name in names))
        for figure in (*JUDGED, "num_preemptions", "num_evictions", "cost_per_million_tokens")
        if any(means[name][figure].mean for name in names)
    ]
    widths = [max(len(row[idx]) for row in rows) for idx in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{name}: {line}" for name in names for line in count_lines(results[name])]
    if len(base) == 1:
        return [*lines, "", "With one seed no difference can be told from chance: give --seeds 3 or more"]
    lines += ["", f"Beside {names[0]}, by the differences of {len(base)} pairs of runs with the same requests:"]
    for name in names[1:]:
        verdicts = []
        for figure in JUDGED:
            gap = difference(figure, results[name], base)
            word = verdict(figure, gap)
            if word != "no difference":
                sign = "+" if gap.mean > 0 else "-"
                size = shown_estimate(Estimate(abs(gap.mean), gap.half_width), TITLES[figure][1])
                verdicts.append(f"{TITLES[figure][0]} {word} ({sign}{size})")
        lines.append(f"  {name}: {'; '.join(verdicts) or 'no difference that the seeds show'}")
    return lines


def found_lines(what: str, search: SearchResult, share: float) -> list[str]:
    """Return the trials of a search, and its result."""
    lines = [f"  {trial.value:>12,.6g} {what}: goodput {100 * trial.goodput:.1f}%" for trial in search.trials]
    lines += count_lines(search.trials[-1].reports)
    if search.best is None:
        return [*lines, "", f"None keeps the limits for {100 * share:g}% of the requests"]
    most = "The largest rate" if what == "rate" else "The fewest replicas"
    unit = " requests/s" if what == "rate" else ""
    return [*lines, "", f"{most} at which {100 * share:g}% keep the limits: {search.best.value:,.6g}{unit}"]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def figures_of(results: Mapping[str, Sequence[SimulationReport]]) -> dict[str, Any]:
    """Return the figures of all variants for JSON: the mean, None of no values, and half the width of its interval."""
    return {
        name or "all": {
            figure: {"mean": _finite(value.mean), "half_width": _finite(value.half_width)}
            for figure, value in estimates_of(reports).items()
        }
        for name, reports in results.items()
    }
