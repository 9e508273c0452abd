"""The benchmark of batches and contexts: which points fit, the roofline, a real engine's steps, and the chart."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.growth import NUM_STEPS, decode, num_beside, points, roofline_tokens_per_s
from benchmarks.growth_chart import draw
from quire import LLM


def test_points_that_the_cache_has_no_room_for_are_left_out() -> None:
    assert points([1, 2, 4], [128, 1024], 2300) == [(128, [1, 2, 4]), (1024, [1, 2])]
    assert points([2], [128, 1024], 1000) == [(128, [2])]
    # What two sequences of 1024 tokens may get besides is counted.
    assert num_beside(2, 1024) == 2048 // 510 + 2 * NUM_STEPS
    assert points([2], [1024], 2 * (1024 + num_beside(2, 1024)) - 1) == []


def test_the_roofline_is_the_lower_of_memory_and_processors() -> None:
    assert roofline_tokens_per_s(2e9, 1e9, 4, {"gb_s": 10.0, "gflop_s": 100.0}) == pytest.approx(4 / 0.2)
    assert roofline_tokens_per_s(2e9, 50e9, 4, {"gb_s": 10.0, "gflop_s": 100.0}) == pytest.approx(4 / 0.5)
    assert roofline_tokens_per_s(2e9, 50e9, 4, {"gb_s": 10.0, "gflop_s": None}) == pytest.approx(4 / 0.2)
    assert roofline_tokens_per_s(2e9, 50e9, 4, {"gb_s": None, "gflop_s": None}) == float("inf")


def test_a_larger_batch_finds_the_prompts_of_a_smaller_one() -> None:
    engine = LLM(skip_tokenizer_init=True, block_size=16, num_kv_blocks=64, max_num_seqs=4).engine
    prompts = [[first, *range(10, 73)] for first in range(4)]
    for batch in (1, 2, 4):
        all_started_s, step_s = decode(engine, prompts[:batch])
        assert all_started_s > 0
        assert step_s > 0
    assert engine.usage().used == 0
    # Of seven prompts three were served before, and of these at least all blocks but the last are found.
    assert engine.stats.prompt_tokens == 7 * 64
    assert engine.stats.prefix_hits >= 3 * 48


def test_the_chart_shows_every_context(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the chart needs matplotlib")
    point = {"tokens_per_s": 10.0, "roofline_tokens_per_s": 20.0}
    rows = [{"context": size, "prompt": point, "decode": [point | {"batch": 1}]} for size in (128, 512)]
    draw({"rows": rows}, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert all(f">{size} tokens<" in drawn for size in (128, 512))
