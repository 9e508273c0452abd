"""How the benchmark beside peers judges: ratios, the best peer, and what a figure is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import make_model
from benchmarks.contenders import CONTENDERS, PACKAGES, peers_of
from benchmarks.conversions import FORMS
from benchmarks.engines import ENGINES
from benchmarks.marks import BITS, MARKS, Mark, MarkResult, bandwidth_share, judge, medians, ratio
from benchmarks.serving import NUM_KV_TOKENS, figures_of
from benchmarks.shapes import CheckpointShape
from quire.measurement.bench.workloads import NAMES, BenchRequest

QWEN3 = CheckpointShape(28, 8, 128, num_linear=440_401_920, num_head=155_582_464, num_other=65_536, is_tied=True)


def row(contender: str, wall_s: float, workload: str = "W3", **more: Any) -> dict[str, Any]:
    figures = {"wall_s": wall_s, "tokens_per_s": 1.0, "all_started_s": 0.1, "peak_memory_bytes": 4_000_000_000}
    return {"contender": contender, "workload": workload, "decode_tokens_per_s": 2.0, **figures, **more}


def test_rows_name_what_there_is() -> None:
    assert {who.engine for who in CONTENDERS.values()} == set(ENGINES) == set(PACKAGES)
    assert {who.form for who in CONTENDERS.values()} - {None} == set(FORMS)
    assert {who.weights for who in CONTENDERS.values()} == set(BITS)
    for mark in MARKS:
        assert mark.contender in CONTENDERS
        assert mark.against in CONTENDERS or peers_of(mark.against)
        assert mark.workload in NAMES
        assert mark.beside is None or mark.beside in NAMES


def test_peers_of_other_precisions_are_not_compared() -> None:
    assert {CONTENDERS[who].engine for who in peers_of("bf16")} == {"generate", "cb", "vllm", "openvino", "llamacpp"}
    assert set(peers_of("q4_k_m")) == {"llamacpp-q4_k_m", "ik-q4_k_m"}
    assert set(peers_of("int8")) == {"openvino-int8", "llamacpp-int8"}


def test_a_verdict_is_the_ratio_of_medians_to_the_best_peer() -> None:
    rows = [row("quire", wall_s) for wall_s in (2.0, 9.0, 4.0)] + [row("openvino-int8", 1.0)]
    rows += [row("openvino", wall_s) for wall_s in (8.0, 16.0, 16.0)] + [row("vllm", wall_s) for wall_s in (9.0, 6.0)]
    table = medians(rows)
    assert table["W3"]["quire"]["wall_s"] == 4.0
    verdict = ratio(Mark("W3", "quire", "bf16", 1.2), table)
    assert verdict == MarkResult("W3 quire against the best peer (vllm), wall_s", 7.5 / 4.0, 1.2, is_met=True)


def test_of_rates_more_is_better() -> None:
    rates = {"quire": 30.0, "openvino": 25.0, "vllm": 20.0}
    table = medians([row(who, 1.0, "W4", decode_tokens_per_s=rate) for who, rate in rates.items()])
    mark = Mark("W4", "quire", "bf16", 1.6, "decode_tokens_per_s")
    assert ratio(mark, table) == MarkResult(
        "W4 quire against the best peer (openvino), decode_tokens_per_s", 1.2, 1.6, is_met=False
    )


def test_a_contender_can_be_judged_against_itself_on_another_workload() -> None:
    table = medians([row("quire", 24.0, "W5-off"), row("quire", 4.0, "W5-warm")])
    verdict = ratio(Mark("W5-warm", "quire", "quire", 4.0, beside="W5-off"), table)
    assert verdict == MarkResult("W5-warm quire against W5-off quire, wall_s", 6.0, 4.0, is_met=True)


def test_what_was_not_measured_is_not_judged() -> None:
    assert ratio(Mark("W3", "quire", "bf16", 1.2), medians([row("quire", 2.0)])) is None
    assert ratio(Mark("W3", "quire", "bf16", 1.2), medians([row("vllm", 2.0)])) is None
    # One new token: there is no rate of decoding.
    rows = [row("quire", 1.0, "W2", decode_tokens_per_s=None), row("vllm", 1.0, "W2", decode_tokens_per_s=None)]
    assert ratio(Mark("W2", "quire", "bf16", 1.0, "decode_tokens_per_s"), medians(rows)) is None


def test_memory_past_weights_and_kv_is_judged_for_quire_only() -> None:
    held = 2 * 596_049_920 + NUM_KV_TOKENS * 114_688
    rows = [row("quire", 1.0, peak_memory_bytes=held + 500_000_000), row("vllm", 1.0, peak_memory_bytes=held * 2)]
    (over,) = [verdict for verdict in judge(medians(rows), QWEN3) if "peak bytes" in verdict.what]
    assert over == MarkResult(
        "W3 quire, peak bytes past weights and KV, at most", 500_000_000, 400_000_000, is_met=False
    )


def test_the_share_of_bandwidth_counts_weights_and_kv() -> None:
    per_step = 2 * (440_401_920 + 155_582_464) + (32 + 64) * 114_688
    one = row("quire", 1.0, "W1", decode_tokens_per_s=30.0, probe_gb_s=[50.0, 40.0])
    assert bandwidth_share(QWEN3, one) == pytest.approx(30.0 * per_step / 45e9)
    assert bandwidth_share(QWEN3, one | {"workload": "W3"}) is None
    assert bandwidth_share(QWEN3, one | {"probe_gb_s": [None, None]}) is None


def test_figures_of_a_run() -> None:
    requests = [BenchRequest([1], 3), BenchRequest([2], 2)]
    # The second request starts when the first has two tokens; two tokens come after that.
    figures = figures_of(requests, 10.0, [[11.0, 12.0, 15.0], [12.5, 14.0]])
    assert figures == {"wall_s": 5.0, "all_started_s": 2.5, "tokens_per_s": 1.0, "decode_tokens_per_s": 2 / 2.5}
    assert figures_of([BenchRequest([1], 1)], 0.0, [[2.0]])["decode_tokens_per_s"] is None
    with pytest.raises(RuntimeError, match=r"asked for \[3, 2\] new tokens, got \[3, 1\]"):
        figures_of(requests, 10.0, [[11.0, 12.0, 15.0], [12.5]])


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_shape_is_read_from_a_checkpoint(tmp_path: Path, is_tied: bool) -> None:
    config = make_model.QWEN3 | {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": is_tied}
    make_model.write(config, tmp_path)
    layer = 8 * 16 * 2 + 8 * 8 * 2 + 3 * 8 * 16
    norms = 2 * (2 * 8 + 2 * 4) + 8
    shape = CheckpointShape.read(tmp_path)
    assert shape == CheckpointShape(2, 2, 4, 2 * layer, 64 * 8, norms + (0 if is_tied else 64 * 8), is_tied)
    assert shape.kv_token_bytes() == 2 * 2 * 2 * 4 * 2
    assert shape.weight_bytes() == 2 * (2 * layer + norms + 64 * 8 * (1 if is_tied else 2))
    # Rows of the embedding are looked up in 16 bits, so a head of 8 bits is a copy.
    assert shape.weight_bytes(8) == 2 * layer + 64 * 8 + 2 * norms + 2 * 64 * 8


def test_what_a_decode_step_costs() -> None:
    assert QWEN3.step_bytes(1000, 4) == 2 * 595_984_384 + 4 * 1000 * 114_688
