"""`quire bench quality`: its two forms of output, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main

ENGINE = ["--num-threads", "1", "--tokens", "40"]


def test_figures_are_lines_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quality", *ENGINE, "--quantization", "int4", "--greedy", "3x4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["model"], said["reference"]) == ("bundled", "bundled")
    assert said["divergence"]["num_positions"] == 39
    assert said["divergence"]["kl_mean"] > 0
    assert (said["greedy"]["num_prompts"], said["greedy"]["num_tokens"]) == (3, 4)
    assert main(["bench", "quality", "bundled", *ENGINE, "--dtype", "float32", "--kernels", "torch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["kernels          torch", "positions        39"]
    assert lines[2].startswith("KL divergence    mean 0.00000, median 0.00000")
    assert lines[-1] == "same best token  100.00%"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "missing.txt"], "text missing.txt cannot be read"),
        (["--reference", "missing"], "missing"),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size must be 1 where quality is measured"),
        (["--greedy", "2x5000"], "greedy outputs must have at most"),
        (["--greedy", "2000x5"], "greedy prompts must be at most 24 without a text, got 2000"),
        (["--dtype", "int3"], "dtype must be one of"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "quality", *ENGINE, *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["20", "0x4", "20x", "x32", "20x32x2", "-1x4", "99999x1"])
def test_greedy_outputs_have_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "quality", f"--greedy={text}"])
    assert "is not numbers of prompts and tokens" in capsys.readouterr().err
