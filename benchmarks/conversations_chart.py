"""Draws `docs/images/conversations.svg`: `python -m benchmarks.conversations_chart`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import machine

IMAGE = machine.HERE.parent / "docs" / "images" / "conversations.svg"
COLOR, EARLIER_COLOR, INK, FAINT = "#1f6f8b", "#d1495b", "#333333", "#dddddd"


def draw_panel(axes: Any, title: str, factors: list[float], curves: dict[str, list[float]]) -> None:
    """Draw the shares of prompt tokens hit over the sizes of the pool."""
    styles = {"now": (COLOR, "-", "o"), "earlier": (EARLIER_COLOR, "--", "s")}
    for name, shares in curves.items():
        color, line, marker = styles[name]
        axes.plot(factors, shares, color=color, ls=line, marker=marker, ms=4, lw=1.6, label=name, zorder=3)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [f"{factor:g}" for factor in factors], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(-0.04, 1.04)
    axes.grid(color=FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(axis="both", length=0, labelcolor=INK, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def draw(figures: dict[str, Any], earlier: dict[str, Any] | None, image: Path) -> None:
    """Draw the chart; the same figures give the same file.

    Args:
        figures: figures of a run.
        earlier: figures of a run at an earlier commit, to compare with; None for none.
        image: the file.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "quire", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure = Figure(figsize=(8.2, 9.0), layout="constrained")
    rows = figures["rows"]
    panels = list(figure.subplots(-(-len(rows) // 2), 2, sharey=True).flat)
    for idx, (axes, row) in enumerate(zip(panels, rows, strict=False)):
        runs = {"now": figures} if earlier is None else {"earlier": earlier, "now": figures}
        curves = {name: [run["hit_share"] for run in each["rows"][idx]["runs"]] for name, each in runs.items()}
        draw_panel(axes, row["model"] + (", host tier" if row["with_host"] else ""), figures["factors"], curves)
    for axes in panels[-2:]:
        axes.set_xlabel("bytes of the pool, in units of the live bytes", fontsize=9, color=INK)
    figure.supylabel("share of prompt tokens hit", fontsize=9, color=INK)
    labels = {"now": "now", "earlier": f"commit {earlier['facts']['commit'][:7]}"} if earlier else {"now": "now"}
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, [labels[name] for name in names], loc="outside lower center", ncols=2, frameon=False)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, metadata={"Date": None})


def main() -> None:
    """Read the results and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="conversations", help="the name of the file under results/")
    parser.add_argument("--earlier", default="conversations-earlier", help="that of an earlier run, if it is there")
    parser.add_argument("--image", type=Path, default=IMAGE)
    options = parser.parse_args()
    figures = json.loads((machine.RESULTS / f"{options.name}.json").read_text(encoding="utf-8"))
    path = machine.RESULTS / f"{options.earlier}.json"
    draw(figures, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None, options.image)
    print(options.image)


if __name__ == "__main__":
    main()
