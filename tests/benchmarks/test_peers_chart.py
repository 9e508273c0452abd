"""The chart beside the peers shows the saved medians, the same ones as the tables of docs/performance.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.peers_chart import NAMES, PANELS, PROMPT_TOKENS, Panel, bars, draw

PAGE = machine.HERE.parent / "docs" / "performance.md"
# Tokens of a workload, where the tables give its wall time.
NUM_TOKENS = {"W1": 128, "W2": PROMPT_TOKENS, "W3": 1174, "W5-warm": 512}
TABLES = {"bf16": "bfloat16", "int8": "int8", "int4": "int4"}


def test_every_engine_of_the_tables_is_in_the_chart() -> None:
    shown = {
        (panel.workload, weights): [bar.engine for bar in bars(panel) if bar.weights == weights]
        for panel in PANELS
        for weights in panel.sources
    }
    assert shown["W1", "bf16"] == list(NAMES)
    assert shown["W1", "int8"] == shown["W1", "int4"] == ["quire", "openvino"]
    assert shown["W3", "bf16"] == shown["W5-warm", "bf16"] == ["quire", "vllm", "openvino"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.workload)
def test_the_bars_are_what_the_tables_show(panel: Panel) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for weights in panel.sources:
        table = page.partition(f"{TABLES[weights]} weights:\n\n")[2].partition("\n\n")[0]
        workload = panel.workload.replace("-", " ")
        row = next(line for line in table.splitlines() if line.startswith(f"| {workload}, wall"))
        walls = [float(wall) for wall in re.findall(r"\| ([\d.]+) s ", row)]
        rates = [bar.value for bar in bars(panel) if bar.weights == weights]
        assert rates == pytest.approx([NUM_TOKENS[panel.workload] / wall for wall in walls], rel=0.005)


def test_the_drawn_chart_names_every_engine(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the chart needs matplotlib")
    draw(tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert all(f">{name}<" in drawn for name in NAMES.values())
