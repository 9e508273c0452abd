"""The benchmarks' checkpoint and verdicts: what figures rest on."""

from __future__ import annotations

from benchmarks import throughput
from benchmarks.make_model import NUM_LAYERS, shapes


def test_the_random_checkpoint_has_the_parameters_of_qwen3_0_6b() -> None:
    total = 0
    for shape in shapes().values():
        count = 1
        for size in shape:
            count *= size
        total += count
    assert NUM_LAYERS == 28
    assert total == 596_049_920


def test_a_verdict_is_the_ratio_of_medians() -> None:
    def row(engine: str, wall_s: float) -> throughput.Figures:
        figures = {"wall_s": wall_s, "tokens_per_s": 1.0, "all_started_s": 0.1, "peak_memory_gib": 1.0}
        return {"engine": engine, "workload": "W3", **figures}

    rows = [row("quire", wall_s) for wall_s in (2.0, 9.0, 4.0)] + [row("cb", wall_s) for wall_s in (8.0, 16.0, 16.0)]
    table = throughput.medians(rows)
    assert table["W3"]["quire"]["wall_s"] == 4.0
    assert throughput.judge(table) == [{"what": "quire W3 against cb W3", "ratio": 4.0, "at_least": 3.5}]
