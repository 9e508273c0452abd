"""Charts of simulations, written as SVG without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from quire.measurement.simulation.report import SimulationReport, estimates_of

if TYPE_CHECKING:
    from quire.measurement.simulation.study import SearchResult

OURS, INK, FAINT = "#1f6f8b", "#333333", "#dddddd"
# Figure, title of its panel, unit, and factor of the values.
PANELS = (
    ("goodput", "Goodput", "%", 100.0),
    ("output_tokens_per_s", "New tokens a second", "", 1.0),
    ("ttft_p50_s", "Time to first token, median", "ms", 1e3),
    ("ttft_p99_s", "Time to first token, 99th percentile", "ms", 1e3),
    ("tpot_p50_s", "Time per output token, median", "ms", 1e3),
    ("hit_rate", "Prefix hit rate", "%", 100.0),
)
WIDTH, LABEL, ROW, TITLE, MARGIN = 760, 230, 22, 34, 16


def draw_variants(results: Mapping[str, Sequence[SimulationReport]]) -> str:
    """Return a chart with a bar of each figure for each variant, with confidence intervals over the seeds."""
    means = {name: estimates_of(reports) for name, reports in results.items()}
    parts, top = [], MARGIN
    for figure, title, unit, factor in PANELS:
        rows = [(name, means[name][figure]) for name in means]
        rows = [(name, value) for name, value in rows if not math.isnan(value.mean)]
        scale = max([factor * value.mean for _, value in rows] + [1e-12])
        parts.append(_text(MARGIN, top + 18, f"{title}{f' ({unit})' if unit else ''}", weight="bold"))
        top += TITLE - 8
        for name, value in rows:
            shown = factor * value.mean
            length = (WIDTH - LABEL - 130) * shown / scale
            parts.append(_text(LABEL - 8, top + 15, name or "all requests", anchor="end"))
            parts.append(f'<rect x="{LABEL}" y="{top + 3}" width="{length:.1f}" height="{ROW - 8}" fill="{OURS}"/>')
            half = factor * value.half_width
            if half < float("inf") and half > 0:
                reach = (WIDTH - LABEL - 130) * half / scale
                low, high = LABEL + max(0.0, length - reach), LABEL + length + reach
                middle = top + ROW / 2 - 1
                parts.append(
                    f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" '
                    f'stroke="{INK}" stroke-width="2"/>'
                )
                length = max(length, high - LABEL)
            parts.append(_text(LABEL + length + 6, top + 15, f"{shown:,.4g}"))
            top += ROW
        top += 10
    return _document(parts, top + MARGIN)


def draw_search(what: str, search: SearchResult) -> str:
    """Return a chart with the goodput of each trial of a search, from the smallest value to the largest."""
    trials = sorted(search.trials, key=lambda trial: trial.value)
    height, left, right = 320, 70, WIDTH - 30
    low, high = trials[0].value, trials[-1].value
    parts = [_text(MARGIN, 26, f"Goodput by {what}", weight="bold")]
    for percent in (0, 25, 50, 75, 100):
        y = 60 + (100 - percent) * 2
        parts.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="{FAINT}"/>')
        parts.append(_text(left - 8, y + 5, f"{percent}%", anchor="end"))
    points = []
    for trial in trials:
        share = (trial.value - low) / (high - low) if high > low else 0.5
        x, level = left + share * (right - left), 60 + 200 * (1 - trial.goodput)
        points.append(f"{x:.1f},{level:.1f}")
        is_best = search.best is not None and trial.value == search.best.value
        parts.append(f'<circle cx="{x:.1f}" cy="{level:.1f}" r="{6 if is_best else 4}" fill="{OURS}"/>')
        if is_best:
            parts.append(_text(x, level - 12, f"{trial.value:,.4g}", anchor="middle", weight="bold"))
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{OURS}"/>')
    parts += [_text(left, 285, f"{low:,.4g}"), _text(right, 285, f"{high:,.4g}", anchor="end")]
    return _document(parts, height)


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text {attributes} fill="{INK}">{escape(text)}</text>'


def _document(parts: Sequence[str], height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="13">'
    )
    back = f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
    return "\n".join((head, back, *parts, "</svg>\n"))
