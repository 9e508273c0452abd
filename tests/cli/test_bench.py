"""`quire bench`: the workload that it makes, the figures that it takes, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest

from quire.cli import bench
from quire.cli.main import main

ENGINE = ["--num-kv-blocks", "64", "--max-model-len", "256", "--num-threads", "1"]


def test_the_same_numbers_give_the_same_workload() -> None:
    job = bench.Job(num_prompts=5, input_len=40, output_len=10, spread=0.5, shared_prefix=8)
    assert bench.requests(job, 1000) == bench.requests(job, 1000)
    assert bench.requests(job, 1000) != bench.requests(bench.Job(num_prompts=5, workload_seed=1), 1000)


def test_lengths_stay_within_the_spread_and_prompts_share_their_prefix() -> None:
    job = bench.Job(num_prompts=50, input_len=40, output_len=10, spread=0.5, shared_prefix=8)
    many = bench.requests(job, 1000)
    assert {len(prompt) for prompt, _ in many} <= set(range(20, 61))
    assert {num_new for _, num_new in many} <= set(range(5, 16))
    assert len({len(prompt) for prompt, _ in many}) > 5
    assert len({tuple(prompt[:8]) for prompt, _ in many}) == 1
    assert len({tuple(prompt) for prompt, _ in many}) == 50


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert bench.percentiles(values) == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert bench.percentiles([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert bench.percentiles([]) == {}


def test_it_serves_every_token_and_reports_consistent_figures(capsys: pytest.CaptureFixture[str]) -> None:
    workload = ["--num-prompts", "3", "--input-len", "20", "--output-len", "6"]
    assert main(["bench", "--json", *workload, *ENGINE]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert (report["num_prompt_tokens"], report["num_new_tokens"]) == (60, 18)
    assert math.isclose(report["output_tokens_per_s"], 18 / report["wall_s"])
    assert math.isclose(report["total_tokens_per_s"], 78 / report["wall_s"])
    assert 0 < report["time_to_first_token_s"]["p99"] <= report["wall_s"]
    assert 0 < report["inter_token_latency_s"]["p50"] <= report["wall_s"]


def test_a_shared_prefix_is_found_in_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    # One sequence at a time, so that the second finds what the first has published.
    workload = ["--num-prompts", "2", "--input-len", "40", "--output-len", "2", "--shared-prefix", "32"]
    assert main(["bench", *workload, *ENGINE, "--max-num-seqs", "1"]) == 0
    assert "80 prompt tokens (32 from the prefix cache), 4 new tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--spread", "1.5"], "spread must be a number from 0 to 1, got 1.5"),
        (["--spread", "nan"], "spread must be a number from 0 to 1, got nan"),
        (["--input-len", "8", "--shared-prefix", "8"], "shared_prefix must be from 0 to input_len - 1 (7), got 8"),
        (["--input-len", "300", *ENGINE], "the prompt has 300 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert main(["bench", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_counts_are_whole_and_positive(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--num-prompts", text])
    assert "is not a whole number of at least 1" in capsys.readouterr().err
