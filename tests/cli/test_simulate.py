"""`quire simulate`: figures, comparisons, searches, charts, and errors that name the option."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.cli.main import main
from quire.errors import EXIT_USER_ERROR
from quire.measurement.bench.simulated_engine import step_times_json
from quire.measurement.simulation.replicas.fit import FitQuality
from quire.measurement.simulation.replicas.step_time import FEATURES, FittedStepTime
from quire.memory.recording.settings import MemorySettings
from quire.memory.specs import FullAttention

SMALL = ("simulate", "bundled", "--num-requests", "40", "--rate", "50", "--input-len", "100", "--output-len", "20")


def simulated(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*SMALL, *flags, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--slo", "ttft=1", "--price", "2.5"]) == 0
    text = capsys.readouterr().out
    assert "bundled on l4, by a roofline" in text
    assert "40 requests" in text
    for title in ("goodput", "first token, p99", "per output token, p50", "prefix hit rate", "cost of 1M new tokens"):
        assert title in text


def test_the_figures_of_the_page_are_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    _, _, blocks = page.partition("```sh\nquire ")
    command, shown = blocks.split("```")[0], blocks.split("```")[2]
    assert main(command.split()) == 0
    assert capsys.readouterr().out.startswith(shown.removeprefix("\n").removesuffix("  ...\n"))


def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    first = simulated(capsys, "--traffic", "chat-sessions", "--seeds", "2")
    assert first == simulated(capsys, "--traffic", "chat-sessions", "--seeds", "2")
    assert first != simulated(capsys, "--traffic", "chat-sessions", "--seeds", "2", "--seed", "5")
    assert 20 < first["variants"]["all"]["num_requests"]["mean"] <= 40


def test_variants_are_compared_and_the_better_one_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    flags = ("--compare", "prefix_caching=on,off", "--system-len", "400", "--seeds", "3", "--chart", str(chart))
    assert main([*SMALL, *flags]) == 0
    text = capsys.readouterr().out
    assert "prefix_caching=off: " in text
    assert "prefix hit rate worse" in text
    assert ElementTree.fromstring(chart.read_text(encoding="utf-8")).tag.endswith("svg")


def test_several_options_are_combined(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "--compare", "eviction=lru,slru", "--compare", "block_size=16,32", "--seeds", "1")
    assert list(found["variants"]) == [
        "eviction=lru, block_size=16",
        "eviction=lru, block_size=32",
        "eviction=slru, block_size=16",
        "eviction=slru, block_size=32",
    ]


def test_prefill_and_decode_apart_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--replicas", "3", "--swap-space", "64MiB", "--transfer-latency-ms", "500", "--transfer-rate", "1GiB")
    found = simulated(capsys, *flags, "--compare", "prefill_replicas=0,1", "--seeds", "1")["variants"]
    whole, apart = (found[f"prefill_replicas={count}"] for count in (0, 1))
    assert apart["num_requests"]["mean"] == whole["num_requests"]["mean"] == 40
    assert 0.5 < apart["ttft_p50_s"]["mean"] - whole["ttft_p50_s"]["mean"] < 0.6


def test_replicas_and_rates_are_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    limits = ("--slo", "ttft=20ms", "--max-num-seqs", "1", "--routing", "least_loaded", "--goodput", "0.9")
    found = simulated(capsys, *limits, "--find", "replicas", "--rate", "200", "--chart", str(chart))
    assert found["best"] > 1
    assert len(found["trials"]) > 2
    assert chart.read_text(encoding="utf-8").startswith("<svg")
    assert main([*SMALL, *limits, "--find", "rate"]) == 0
    assert "The largest rate at which 90% keep the limits" in capsys.readouterr().out
    assert main([*SMALL, "--slo", "ttft=1us", "--find", "replicas"]) == EXIT_USER_ERROR
    assert main([*SMALL, "--slo", "ttft=0.00001", "--find", "replicas", "--max-replicas", "3"]) == 1
    assert "None keeps the limits" in capsys.readouterr().out


def test_a_trace_is_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [1]}
    path.write_text("\n".join(json.dumps({**row, "timestamp": 1000 * idx}) for idx in range(5)))
    assert main(["simulate", "bundled", "--trace", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["variants"]["all"]
    # Four of five find the 512 tokens behind the one hash.
    assert figures["hit_rate"]["mean"] == pytest.approx(4 * 512 / (5 * 600))


def test_requests_that_do_not_fit_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    long = ("--input-len", "900", "--output-len", "900", "--shorten")
    assert simulated(capsys, *long)["variants"]["all"]["num_shortened"]["mean"] == 40
    assert main([*SMALL, *long]) == 0
    assert "40 of 40 requests were shortened: they exceeded the longest context" in capsys.readouterr().out
    assert simulated(capsys)["variants"]["all"]["num_shortened"]["mean"] == 0
    # The mean fits, and some are longer.
    shape = ("--input-len", "400", "--input-sigma", "1.5")
    assert 0 < simulated(capsys, *shape)["variants"]["all"]["num_shortened"]["mean"] < 20
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": count, "output_length": 100} for count in (100, 1000, 1023, 1024, 5000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["simulate", "bundled", "--trace", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["variants"]["all"]
    counts = [figures[name]["mean"] for name in ("num_requests", "num_shortened", "num_rejected")]
    assert counts == [3, 2, 2]
    assert figures["output_tokens_per_s"]["mean"] * figures["duration_s"]["mean"] == pytest.approx(100 + 24 + 1)


@pytest.mark.parametrize("flags", [(), ("--compare", "eviction=lru,lfu", "--seeds", "2")])
def test_figures_of_no_request_are_none(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chart = tmp_path / "chart.svg"
    command = [*SMALL, "--num-kv-blocks", "3", *flags, "--chart", str(chart)]
    assert main(command) == 1
    text = capsys.readouterr().out
    assert "40 of 40 requests were rejected" in text or "80 of 80 requests were rejected" in text
    assert "0.0 ms" not in text
    assert "nan" not in text
    assert ElementTree.fromstring(chart.read_text(encoding="utf-8")).tag.endswith("svg")
    assert main([*command, "--json"]) == 1
    for figures in json.loads(capsys.readouterr().out)["variants"].values():
        assert figures["ttft_p50_s"] == {"mean": None, "half_width": None}


@pytest.mark.parametrize("error", [0.02, -0.46])
def test_the_errors_of_a_fit_are_repeated(error: float, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    step_time = FittedStepTime(dict.fromkeys(FEATURES, 1e-6))
    quality = FitQuality(99, 0.03, 0.08, error, 0.97)
    memory = MemorySettings(specs=(FullAttention(block_size=16, element_bytes=2),), num_blocks=200)
    path = tmp_path / "steps.json"
    path.write_text(step_times_json("a test", step_time, quality._asdict(), {"block_size": 16}, memory))
    command = ["simulate", "--step-times", str(path), "--num-requests", "3", "--input-len", "20", "--output-len", "5"]
    assert main(command) == 0
    name, line, *rest = capsys.readouterr().out.splitlines()
    assert (name, line) == ("a test", quality.lines()[0])
    assert f"of all together {100 * error:+.1f}%" in line
    assert rest[0].startswith("Warning: these errors are large") is (error < -0.1)
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"] == {**quality._asdict(), "is_large": error < -0.1}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--input-len", "3000"), "together must be at most the context of 1,024 tokens, got 3,128"),
        (("--output-len", "900", "--system-len", "500"), "give shorter ones, or --shorten to cut the requests"),
        (("--max-context", "2000"), "max_context must be at most max_model_len (1024), got 2000"),
        (("--hardware", "h900"), "hardware must be one of b200, h100"),
        (("--routing", "random"), "routing must be one of round_robin"),
        (("--traffic", "none"), "traffic must be one of uniform"),
        (("--rate", "0"), "rate must be a number from"),
        (("--rate", "x"), "--rate"),
        (("--turns", "0.5"), "turns must be a number from 1"),
        (("--slo", "first=1"), "slo must be"),
        (("--find", "rate"), "--find rate needs --slo"),
        (("--find", "rate", "--slo", "ttft=1", "--compare", "eviction=lru,lfu"), "cannot be combined with --compare"),
        (("--compare", "colour=red,blue"), "compare must be NAME=A,B"),
        (("--compare", "eviction"), "compare must be NAME=A,B"),
        (("--compare", "eviction=lru"), "two values or more"),
        (("--compare", "eviction=lru,random"), "eviction_policy must be"),
        (("--compare", "block_size=16,x"), "block_size must be a value of block_size, got 'x'"),
        (("--compare", "prefix_caching=on,maybe"), "prefix_caching must be on or off"),
        (("--compare", "routing=round_robin,odd"), "routing must be one of"),
        (("--compare", "replicas=1,0"), "replicas must be a whole number"),
        (("--compare", "eviction=lru,lfu", "--compare", "eviction=lru,fifo"), "compare has eviction twice"),
        (("--hash-block", "512"), "hash_block applies to --trace only"),
        (("--trace", "none.jsonl", "--rate", "3"), "num_requests shapes synthetic traffic"),
        (("--step-times", "none.json"), "step_times none.json cannot be read"),
        (("--step-times", "none.json", "--gpus", "2"), "gpus cannot be changed with --step-times"),
        (("--step-times", "none.json", "--dtype", "float32"), "dtype cannot be changed with --step-times"),
        (("--replicas", "2", "--prefill-replicas", "2"), "prefill_replicas must be less than replicas (2), got 2"),
        (("--prefill-replicas", "-1"), "--prefill-replicas"),
        (("--prefill-replicas", "1.5"), "--prefill-replicas"),
        (("--replicas", "2", "--compare", "prefill_replicas=0,2"), "prefill_replicas must be less than replicas (2)"),
        (
            ("--replicas", "2", "--prefill-replicas", "1", "--compare", "prefix_caching=on,off"),
            "prefill_replicas needs enable_prefix_caching",
        ),
        (("--transfer-rate", "1GB"), "transfer_rate applies with --prefill-replicas only"),
        (
            ("--find", "replicas", "--slo", "ttft=1", "--prefill-replicas", "1"),
            "--find replicas cannot be combined with --prefill-replicas",
        ),
        (("--chart", "no/folder/chart.svg"), "chart no/folder/chart.svg cannot be written"),
        (("--price", "-1"), "--price"),
        (("--goodput", "0"), "--goodput"),
        (("--block-size", "0"), "block_size"),
        (("--preemption-mode", "swap"), "preemption_mode 'swap' needs swap_space"),
    ],
)
def test_wrong_options_are_named(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "bundled", "--num-requests", "3", *flags]
    try:
        code = main(command)
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


def test_a_simulation_needs_no_torch() -> None:
    program = (
        "import sys; from quire.cli.main import main; main(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, *SMALL], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0
