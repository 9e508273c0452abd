"""The saved figures of beam search are complete, and are those that the documents show."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import beams, efficiency_beams, machine
from benchmarks.beams import BeamWorkload, judge
from benchmarks.efficiency import ENGINES
from benchmarks.efficiency_beams import BeamRun, measure, runs

DOCS = machine.HERE.parent / "docs"


def test_the_saved_savings_are_of_all_runs_and_are_what_the_table_shows() -> None:
    figures = json.loads((machine.RESULTS / "efficiency_beams.json").read_text(encoding="utf-8"))
    assert [BeamRun(*(row[name] for name in BeamRun._fields)) for row in figures["rows"]] == runs()
    text = (DOCS / "memory" / "sizing.md").read_text(encoding="utf-8").partition("Beams share more")[2]
    for engine in ("simulated", "bundled"):
        for dataset in ("ShareGPT", "Alpaca"):
            rows = [row for row in figures["rows"] if (row["engine"], row["dataset"]) == (engine, dataset)]
            shown = " | ".join(f"{100 * row['saved_by_sharing']:.1f}" for row in rows)
            assert f"| {dataset}, {engine} | {shown} |" in text


@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=pytest.mark.slow) for name in ENGINES],
)
def test_beams_share_more_than_their_prompt(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setitem(efficiency_beams.POOL_BLOCKS, "Alpaca", 160)
    row = measure(BeamRun(engine, "Alpaca", 4, 60))
    assert row["num_full_steps"] > 5
    assert 0.3 < row["saved_by_sharing"] < 0.75
    assert row["copies_per_step"] > 0


def test_the_saved_run_keeps_the_marks() -> None:
    figures = json.loads((machine.RESULTS / "beams.json").read_text(encoding="utf-8"))
    assert {row["job"] for row in figures["runs"]} == set(beams.ENGINE_OF)
    verdict = judge(figures["runs"], BeamWorkload(**figures["work"]))
    assert verdict["times_transformers"] == figures["times_transformers"] >= beams.AT_LEAST
    assert verdict["times_greedy"] == figures["times_greedy"] <= beams.AT_MOST
    text = (DOCS / "lab" / "beam-search.md").read_text(encoding="utf-8")
    shown = re.search(r"saved\].*\| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) times, ([\d.]+) times", text)
    assert shown is not None
    wall_s = figures["wall_s"]
    known = [wall_s["beams"], wall_s["transformers"], wall_s["greedy"]]
    known += [figures["times_transformers"], figures["times_greedy"]]
    assert [float(value) for value in shown.groups()] == pytest.approx(known, abs=0.05)
