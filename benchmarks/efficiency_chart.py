"""Draws `docs/images/efficiency.svg` from `results/efficiency.json`: `python -m benchmarks.efficiency_chart`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine

IMAGE = machine.HERE.parent / "docs" / "images" / "efficiency.svg"
OURS, OTHERS, PAPER, INK, FAINT = "#1f6f8b", "#b9b9b9", "#d1495b", "#333333", "#dddddd"
CONTIGUOUS = {
    "maximum": "contiguous, maximum length",
    "power of two": "contiguous, output to a power of two",
    "oracle": "contiguous, exact length known",
    "doubling": "contiguous, doubled when full",
}


class EfficiencyBar(NamedTuple):
    """One row of a panel, in percent.

    Args:
        label: label of the row.
        value: the bar's length, from the simulated engine.
        bundled: the same from the bundled model, a ring.
        published: the paper's figure, a diamond; None where there is none.
        color: color of the bar.
    """

    label: str
    value: float
    bundled: float
    published: float | None
    color: str


def select(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Return the one row that has the wanted values.

    Raises:
        ValueError: no row has them, or several have.
    """
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def share_bars(figures: dict[str, Any], dataset: str) -> list[EfficiencyBar]:
    """Return the share of KV bytes that hold tokens, for each way to give memory out."""
    published = figures["published_percent"]["shares"] if dataset == "ShareGPT" else {}

    def bar(label: str, name: str, block_size: int, color: str, beside: float | None) -> EfficiencyBar:
        wanted = {"dataset": dataset, "block_size": block_size, "num_samples": 1}
        ours, real = (
            100 * select(figures["rows"], engine=engine, **wanted)["shares"][name]
            for engine in ("simulated", "bundled")
        )
        return EfficiencyBar(label, ours, real, beside, color)

    return [bar(label, name, 16, OTHERS, published.get(name)) for name, label in CONTIGUOUS.items()] + [
        bar("Quire, blocks of 16", "paged", 16, OURS, published.get("paged")),
        bar("Quire, blocks of 8", "paged", 8, OURS, None),
    ]


def saving_bars(figures: dict[str, Any]) -> list[EfficiencyBar]:
    """Return the share of blocks that parallel samples save, for each dataset and number of samples."""
    published = figures["published_percent"]["saved_by_sharing"]
    bars = []
    for dataset in ("ShareGPT", "Alpaca"):
        for num_samples in (2, 4, 6):
            wanted = {"dataset": dataset, "block_size": 16, "num_samples": num_samples}
            ours, real = (
                100 * select(figures["rows"], engine=engine, **wanted)["saved_by_sharing"]
                for engine in ("simulated", "bundled")
            )
            beside = published.get(dataset, {}).get(str(num_samples))
            bars.append(EfficiencyBar(f"{dataset}, {num_samples} samples", ours, real, beside, OURS))
    return bars


def draw_panel(axes: Any, title: str, bars: list[EfficiencyBar], limit: float) -> None:
    """Draw one panel of horizontal bars from 0 to `limit` percent, each with its figure in a column at the right."""
    places = range(len(bars))
    axes.barh(places, [bar.value for bar in bars], height=0.62, color=[bar.color for bar in bars], zorder=2)
    axes.scatter([bar.bundled for bar in bars], places, s=34, facecolor="white", edgecolor=INK, linewidth=1.1, zorder=4)
    known = [(bar.published, place) for place, bar in enumerate(bars) if bar.published is not None]
    if known:
        axes.scatter(*zip(*known, strict=True), s=46, marker="D", color=PAPER, zorder=3)
    for place, bar in enumerate(bars):
        axes.text(limit * 1.015, place, f"{bar.value:.1f} %", va="center", ha="left", fontsize=9, color=INK)
    axes.set_yticks(places, [bar.label for bar in bars], fontsize=9)
    axes.set_xlim(0, limit)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.grid(axis="x", color=FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(axis="both", length=0, labelcolor=INK)
    for side in axes.spines.values():
        side.set_visible(False)


def draw(figures: dict[str, Any], image: Path) -> None:
    """Draw the chart; the same figures give the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    mpl.rcParams.update({"svg.hashsalt": "quire", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure = Figure(figsize=(8.2, 8.4), layout="constrained")
    panels = figure.subplots(3, 1, height_ratios=(6, 6, 6))
    share = "KV bytes given out that hold tokens, %"
    draw_panel(panels[0], f"ShareGPT-like lengths: {share}", share_bars(figures, "ShareGPT"), 100)
    draw_panel(panels[1], f"Alpaca-like lengths: {share}", share_bars(figures, "Alpaca"), 100)
    draw_panel(panels[2], "Parallel samples of a prompt: blocks saved by sharing, %", saving_bars(figures), 40)
    figure.legend(
        handles=[
            Patch(color=OURS, label="Quire, simulated model of 2048 tokens"),
            Patch(color=OTHERS, label="same sequences, reserved contiguously"),
            Line2D([], [], marker="o", ls="", mfc="white", mec=INK, label="bundled model of 1024 tokens"),
            Line2D([], [], marker="D", ls="", color=PAPER, label="published (SOSP 2023)"),
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, metadata={"Date": None})


def main() -> None:
    """Read the results and draw them."""
    figures = json.loads((machine.RESULTS / "efficiency.json").read_text(encoding="utf-8"))
    draw(figures, IMAGE)
    print(IMAGE)


if __name__ == "__main__":
    main()
