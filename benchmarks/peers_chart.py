"""Draws `docs/images/peers.svg` from `results/peers-*.json`: `python -m benchmarks.peers_chart`.

Each bar is the median of one engine's runs. The engines of one group of bars took turns in the same run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.contenders import CONTENDERS

IMAGE = machine.HERE.parent / "docs" / "images" / "peers.svg"
INK, FAINT = "#333333", "#dddddd"
COLORS = {"quire": "#1f6f8b", "vllm": "#edae49", "openvino": "#66a182", "llamacpp": "#b9b9b9"}
NAMES = {"quire": "Quire", "vllm": "vLLM", "openvino": "OpenVINO GenAI", "llamacpp": "llama.cpp"}
PROMPT_TOKENS = 1024


class Panel(NamedTuple):
    """One workload.

    Args:
        title: title of the panel.
        workload: name of the workload in the results.
        sources: class of weights -> name of the results (after `peers-`).
        prompt: whether prompt tokens are counted instead of new ones.
    """

    title: str
    workload: str
    sources: dict[str, str]
    prompt: bool = False


PANELS = (
    Panel("One stream, tokens/s", "W1", {"bf16": "w1", "int8": "int8-w1-w2", "int4": "int4-w1"}),
    Panel("A prompt of 1024 tokens, prompt tokens/s", "W2", {"bf16": "w2", "int8": "int8-w1-w2"}, prompt=True),
    Panel("16 requests at once, tokens/s", "W3", {"bf16": "w3-again", "int8": "int8-w3"}),
    Panel("16 requests behind a cached prefix of 512 tokens, tokens/s", "W5-warm", {"bf16": "w5"}),
)


class PeerBar(NamedTuple):
    """One engine on one workload with one class of weights."""

    weights: str
    engine: str
    value: float


def bars(panel: Panel, results: Path = machine.RESULTS) -> list[PeerBar]:
    """Return a panel's bars, by class of weights and then by engine.

    An engine with several contenders in a class has its default one: the first in `CONTENDERS`.
    """
    found: dict[tuple[str, str], PeerBar] = {}
    for weights, source in panel.sources.items():
        figures = json.loads((results / f"peers-{source}.json").read_text(encoding="utf-8"))
        medians = figures["medians"][panel.workload]
        for name, contender in CONTENDERS.items():
            if name in medians and contender.weights == weights and (weights, contender.engine) not in found:
                row = medians[name]
                value = PROMPT_TOKENS / row["wall_s"] if panel.prompt else row["tokens_per_s"]
                found[weights, contender.engine] = PeerBar(weights, contender.engine, value)
    return sorted(
        found.values(), key=lambda bar: (list(panel.sources).index(bar.weights), list(NAMES).index(bar.engine))
    )


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw one panel of horizontal bars with their figures; a gap parts the classes of weights."""
    rows = bars(panel)
    classes = list(panel.sources)
    places = [place + 0.8 * classes.index(bar.weights) for place, bar in enumerate(rows)]
    axes.barh(places, [bar.value for bar in rows], height=0.78, color=[COLORS[bar.engine] for bar in rows], zorder=2)
    limit = max(bar.value for bar in rows)
    for place, bar in zip(places, rows, strict=True):
        axes.text(bar.value + limit * 0.012, place, f"{bar.value:,.0f}", va="center", fontsize=9, color=INK)
    middles = []
    for weights in classes:
        own = [place for place, bar in zip(places, rows, strict=True) if bar.weights == weights]
        middles.append(sum(own) / len(own))
    axes.set_yticks(middles, classes, fontsize=9)
    axes.set_xlim(0, limit * 1.12)
    axes.set_ylim(max(places) + 0.6, -0.6)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.grid(axis="x", color=FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(axis="both", length=0, labelcolor=INK, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)


def draw(image: Path) -> None:
    """Draw the chart; the same figures give the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    mpl.rcParams.update({"svg.hashsalt": "quire", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure = Figure(figsize=(8.2, 7.4), layout="constrained")
    heights = [len(bars(panel)) + len(panel.sources) + 1 for panel in PANELS]
    for axes, panel in zip(figure.subplots(len(PANELS), 1, height_ratios=heights), PANELS, strict=True):
        draw_panel(axes, panel)
    handles = [Patch(color=color, label=NAMES[engine]) for engine, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, metadata={"Date": None})


def main() -> None:
    """Read the results and draw them."""
    draw(IMAGE)
    print(IMAGE)


if __name__ == "__main__":
    main()
