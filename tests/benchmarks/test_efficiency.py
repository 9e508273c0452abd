"""How full blocks are: the lengths, the pure functions on moments made by hand, and small runs of real engines."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from statistics import fmean, median

import pytest

from benchmarks import efficiency, efficiency_chart, machine
from benchmarks.efficiency import ENGINES, FillRun, measure, moments, options_of, runs
from benchmarks.efficiency_moments import (
    RESERVES,
    HeldSequence,
    Moment,
    bound,
    filled_slots,
    paged_share,
    power_of_two,
    reserved_share,
    saved_by_sharing,
)
from benchmarks.efficiency_traces import DATASETS, DatasetRequest, lengths, trace
from quire.memory.manager import KVCacheManager

# Two samples that share a prompt's full block, and one sequence alone whose last block holds one token.
SHARING = Moment(
    (HeldSequence(6, 10, 7, (1, 2)), HeldSequence(6, 10, 8, (1, 3)), HeldSequence(3, 20, 9, (4, 5, 6))),
    block_size=4,
    num_used=6,
    is_full=True,
)


def test_a_shared_blocks_tokens_count_once() -> None:
    assert filled_slots(SHARING) == {1: 4, 2: 3, 3: 4, 4: 4, 5: 4, 6: 1}
    assert paged_share(SHARING) == pytest.approx(20 / 24)
    assert saved_by_sharing(SHARING) == pytest.approx(1 / 7)


def test_a_shared_last_block_counts_for_who_fills_it_most() -> None:
    moment = Moment((HeldSequence(2, 9, 3, (7,)), HeldSequence(2, 9, 2, (7,))), block_size=4, num_used=1, is_full=False)
    assert paged_share(moment) == 3 / 4


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (SHARING._replace(num_used=7), "tables name 6 blocks, the manager counts 7"),
        (SHARING._replace(sequences=(HeldSequence(1, 9, 4, (1, 2)),), num_used=2), "holds no token"),
    ],
)
def test_figures_that_contradict_each_other_are_noticed(broken: Moment, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        paged_share(broken)


@pytest.mark.parametrize(
    ("name", "slots"),
    [("maximum", 64 + 64), ("power of two", (20 + 32) + (3 + 8)), ("oracle", 45 + 11), ("doubling", 32 + 16)],
)
def test_what_a_contiguous_reservation_has(name: str, slots: int) -> None:
    sequences = (HeldSequence(20, 45, 22, (1, 2)), HeldSequence(3, 11, 10, (3,)))
    moment = Moment(sequences, block_size=16, num_used=3, is_full=True)
    assert reserved_share(RESERVES[name], moment, 64) == pytest.approx(32 / slots)


def test_no_reservation_exceeds_the_models_length() -> None:
    long = HeldSequence(40, 60, 59, ())
    assert {name: reserve(long, 60) for name, reserve in RESERVES.items()} == dict.fromkeys(RESERVES, 60)


def test_powers_of_two() -> None:
    assert [power_of_two(number) for number in (1, 2, 3, 4, 5, 25, 32, 33)] == [1, 2, 4, 4, 8, 32, 32, 64]


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_uniform_fills_of_the_last_block_meet_the_bound(block_size: int) -> None:
    sequences = tuple(
        HeldSequence(1, 100, 32 + fill, tuple(range(100 * fill, 100 * fill - (-(32 + fill) // block_size))))
        for fill in range(1, block_size + 1)
    )
    blocks = set(itertools.chain.from_iterable(held.block_ids for held in sequences))
    moment = Moment(sequences, block_size, len(blocks), is_full=True)
    assert paged_share(moment) == pytest.approx(bound([held.num_stored for held in sequences], block_size))


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("max_model_len", [1024, 2048])
def test_lengths_have_the_published_means(name: str, max_model_len: int) -> None:
    dataset = DATASETS[name]
    works = trace(dataset, max_model_len, 200, vocab_size=256)
    assert fmean(len(work.prompt) for work in works) == pytest.approx(dataset.mean_prompt, abs=0.1)
    assert fmean(work.num_new for work in works) == pytest.approx(dataset.mean_output, abs=0.1)
    assert max(len(work.prompt) + work.num_new for work in works) <= max_model_len
    assert works == trace(dataset, max_model_len, 200, vocab_size=256)


def test_lengths_are_log_normal() -> None:
    drawn = sorted(lengths(100.0, 100_000, 1000, random.Random(0)))
    # The mean of a log-normal distribution of spread 1 is exp(1/2) times its median.
    assert fmean(drawn) / median(drawn) == pytest.approx(1.65, rel=0.02)
    assert drawn[841] / median(drawn) == pytest.approx(2.72, rel=0.02)


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.slow if name == "bundled" else []) for name in ENGINES]
)
def test_only_last_blocks_are_partly_empty(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setitem(efficiency.POOL_TOKENS, "Alpaca", 2048)
    row = measure(FillRun(engine, "Alpaca", 16, 1, 150))
    assert row["num_full_steps"] > 20
    assert row["used_share_of_pool"] > 0.9
    assert row["shares"]["paged"] == pytest.approx(row["bound"], abs=0.01)
    assert row["shares"]["paged"] > max(row["shares"][name] for name in RESERVES)
    assert row["saved_by_sharing"] == 0


def test_samples_of_a_prompt_share_its_full_blocks_and_nothing_else() -> None:
    run = FillRun("simulated", "Alpaca", 16, 4, 1)
    engine = ENGINES["simulated"](**options_of(run))
    seen = list(moments(engine, [DatasetRequest(list(range(40)), 20)], 4))
    # 32 of 40 prompt tokens fill two blocks. The third is copied for all samples but one, and a fourth is not needed
    # before 48 tokens are stored.
    assert [saved_by_sharing(moment) for moment in seen[1:9]] == [pytest.approx(6 / 12)] * 8
    assert [saved_by_sharing(moment) for moment in seen[9:-1]] == [pytest.approx(6 / 16)] * 10
    assert seen[-1].sequences == ()


def test_a_leaked_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    free = KVCacheManager.free

    def free_all_but_one(memory: KVCacheManager, seq_id: int, **how: bool) -> None:
        if seq_id == 0:
            memory.groups[0].pool.retain(memory.block_table(seq_id)[:1])
        free(memory, seq_id, **how)

    monkeypatch.setattr(KVCacheManager, "free", free_all_but_one)
    with pytest.raises(RuntimeError, match="1 blocks are used after all requests have finished"):
        measure(FillRun("simulated", "Alpaca", 16, 1, 120))


def test_a_pool_that_never_fills_says_nothing() -> None:
    with pytest.raises(RuntimeError, match="memory was never full"):
        measure(FillRun("simulated", "Alpaca", 16, 1, 3))


def test_the_saved_results_are_of_all_runs_and_reach_the_published_share() -> None:
    figures = json.loads((machine.RESULTS / "efficiency.json").read_text(encoding="utf-8"))
    assert [FillRun(*(row[name] for name in FillRun._fields)) for row in figures["rows"]] == runs()
    for block_size, at_least in ((16, 0.963), (8, 0.98)):
        row = efficiency_chart.select(
            figures["rows"], engine="simulated", dataset="ShareGPT", block_size=block_size, num_samples=1
        )
        assert row["shares"]["paged"] >= at_least


def test_the_chart_is_drawn_from_the_saved_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the chart needs matplotlib")
    figures = json.loads((machine.RESULTS / "efficiency.json").read_text(encoding="utf-8"))
    efficiency_chart.draw(figures, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    for bar in efficiency_chart.share_bars(figures, "ShareGPT") + efficiency_chart.saving_bars(figures):
        assert f">{bar.value:.1f} %<" in drawn


def test_the_documents_chart_shows_the_saved_results() -> None:
    figures = json.loads((machine.RESULTS / "efficiency.json").read_text(encoding="utf-8"))
    shown = re.findall(r">(\d+\.\d) %<", efficiency_chart.IMAGE.read_text(encoding="utf-8"))
    bars = [efficiency_chart.share_bars(figures, name) for name in DATASETS] + [efficiency_chart.saving_bars(figures)]
    assert shown == [f"{bar.value:.1f}" for bar in itertools.chain.from_iterable(bars)]
