"""`quire bench`: its flags, its two forms of output, and what it refuses."""

from __future__ import annotations

import json

import pytest

from quire.cli.main import main

ENGINE = ["--num-kv-blocks", "64", "--max-model-len", "256", "--num-threads", "1"]


def test_a_workload_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", "--workload", "W1", *ENGINE]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["workload"] == {"name": "W1"}
    assert (said["report"]["num_prompt_tokens"], said["report"]["num_new_tokens"]) == (32, 128)


def test_a_shared_prefix_is_found_in_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    # One sequence at a time, so that the second finds what the first has published.
    workload = ["--num-prompts", "2", "--input-len", "40", "--output-len", "2", "--shared-prefix", "32"]
    assert main(["bench", *workload, *ENGINE, "--max-num-seqs", "1"]) == 0
    assert "80 prompt tokens (32 from the prefix cache), 4 new tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--spread", "1.5"], "spread must be a number from 0 to 1 for uniform lengths, got 1.5"),
        (["--workload", "W1", "--spread", "0.5"], "--spread applies to custom workloads only"),
        (["--workload", "W5-off", "--enable-prefix-caching"], "W5-off is the workload without prefix caching"),
        (["--input-len", "300", *ENGINE], "--input-len and --output-len together must be at most the context of 256"),
    ],
    ids=["spread", "spread of a workload", "prefix caching", "lengths"],
)
def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert main(["bench", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_counts_are_whole_and_positive(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--num-prompts", text])
    assert "is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--workload", "W1"), ("--profile",), ("--num-prompts", "3")])
def test_a_fit_takes_no_workload(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bundled", "--fit", "steps.json", *flags]) == 2
    assert f"{flags[0]} does not apply to --fit" in capsys.readouterr().err
