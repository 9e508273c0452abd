"""Draws `docs/images/growth.svg` from `results/growth.json`: `python -m benchmarks.growth_chart`."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from benchmarks import machine

IMAGE = machine.HERE.parent / "docs" / "images" / "growth.svg"
COLORS = ("#1f6f8b", "#d1495b", "#edae49", "#66a182", "#2e4057")
INK, FAINT = "#333333", "#dddddd"


def draw_curve(axes: Any, xs: list[int], rows: list[dict[str, float]], color: str, label: str | None = None) -> None:
    """Draw measured rates with points, and their roofline dashed."""
    axes.plot(xs, [row["tokens_per_s"] for row in rows], marker="o", ms=4, lw=1.6, color=color, label=label)
    axes.plot(xs, [row["roofline_tokens_per_s"] for row in rows], ls="--", lw=1.1, color=color)


def finish_panel(axes: Any, title: str, unit: str, xs: list[int]) -> None:
    """Set a panel's scales and its words; both axes are logarithmic."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(xs, [str(x) for x in xs], fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel(unit, fontsize=9, color=INK)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.grid(color=FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(axis="both", length=0, labelcolor=INK, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)


def draw(figures: dict[str, Any], image: Path) -> None:
    """Draw the chart; the same figures give the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    mpl.rcParams.update({"svg.hashsalt": "quire", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure = Figure(figsize=(8.2, 7.6), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(3, 2))
    batches: dict[int, None] = {}
    for color, row in zip(itertools.cycle(COLORS), figures["rows"], strict=False):
        xs = [point["batch"] for point in row["decode"]]
        batches |= dict.fromkeys(xs)
        draw_curve(panels[0], xs, row["decode"], color, f"{row['context']:,} tokens")
    finish_panel(panels[0], "Decoding, tokens/s", "sequences in a step", list(batches))
    contexts = [row["context"] for row in figures["rows"]]
    draw_curve(panels[1], contexts, [row["prompt"] for row in figures["rows"]], INK)
    finish_panel(panels[1], "Prompts, tokens/s", "tokens of the prompt", contexts)
    handles = [
        *panels[0].get_legend_handles_labels()[0],
        Line2D([], [], ls="--", lw=1.1, color=INK, label="what bytes and operations allow (16-bit weights)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, metadata={"Date": None})


def main() -> None:
    """Read the results and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="growth", help="the name of the file under results/")
    parser.add_argument("--image", type=Path, default=IMAGE)
    options = parser.parse_args()
    figures = json.loads((machine.RESULTS / f"{options.name}.json").read_text(encoding="utf-8"))
    draw(figures, options.image)
    print(options.image)


if __name__ == "__main__":
    main()
