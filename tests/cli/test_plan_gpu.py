"""`quire plan` of a GPU: its memory is divided as an engine there divides it, by estimates in place of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli.main import main
from quire.config import GIB
from quire.measurement.bench.hardware import HARDWARE
from quire.measurement.bench.simulated_engine import engine_on_hardware
from tests.cli.plans import MIB, planned, written

GPU = ("--device", "cuda", "--memory", "80G")
BLOCK = 2 * MIB


def test_the_cache_has_what_weights_and_steps_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Llama 3.1 8B")
    for flags, share in (((), 0.9), (("--gpu-memory-utilization", "0.5"), 0.5)):
        plan = planned(capsys, model, *GPU, "--max-model-len", "8192", *flags)
        gpu = plan["gpu"]
        assert (gpu["memory_bytes"], gpu["gpu_memory_utilization"]) == (80 * 10**9, share)
        assert min(gpu["step_bytes"], gpu["graph_bytes"]) > 100 * MIB
        left = int(80e9 * share) - plan["weights_bytes"] - gpu["step_bytes"] - gpu["graph_bytes"]
        assert plan["arena_bytes"] == left // BLOCK * BLOCK
        assert plan["groups"][0]["num_blocks"] == plan["arena_bytes"] // BLOCK - 1


def test_a_cpu_has_none_of_this(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Llama 3.1 8B")
    plans = [
        planned(capsys, model, "--memory", "80G", *flags)
        for flags in ((), ("--device", "auto"), ("--device", "cpu"), ("--gpu-memory-utilization", "0.5"))
    ]
    assert [plan["gpu"] for plan in plans] == [None] * 4
    assert plans[0]["arena_bytes"] == (80 * 10**9 - plans[0]["weights_bytes"]) // 2 // BLOCK * BLOCK
    assert len({plan["arena_bytes"] for plan in plans}) == 1
    assert planned(capsys, model, "--device", "cuda")["gpu"] is None


@pytest.mark.parametrize("name", ["b200", "h100", "h200", "a100", "l40s", "l4"])
def test_a_name_stands_for_a_memory(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Qwen3 0.6B")
    num_bytes = str(int(HARDWARE[name].memory_bytes))
    expected = planned(capsys, model, "--device", "cuda", "--memory", num_bytes)
    for more in ((), ("--device", "auto")):
        plan = planned(capsys, model, "--gpu", name, *more)
        assert len(plan.pop("decode_tokens_per_s")) == len(plan["lengths"])
        assert plan == expected


# Total memory that CUDA reports, in GiB, as PyTorch's out-of-memory errors of these GPUs show it.
REPORTED = {"b200": 178.36, "h100": 79.18, "h200": 139.81, "a100": 79.25, "l40s": 44.42, "l4": 22.06}


@pytest.mark.parametrize("name", REPORTED)
def test_the_memory_of_a_gpu_is_what_its_driver_reports(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(capsys, written(tmp_path, "Qwen3 0.6B"), "--gpu", name)
    assert 0 <= REPORTED[name] - plan["gpu"]["memory_bytes"] / GIB < 0.2


def test_options_that_change_the_memory_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Llama 3.1 8B")

    def sizes(*flags: str) -> tuple[int, int]:
        gpu = planned(capsys, model, *GPU, *flags)["gpu"]
        return gpu["step_bytes"], gpu["graph_bytes"]

    step_bytes, graph_bytes = sizes()
    # Draws of many sequences are the largest step, or prompts where sequences are few.
    many, graphs_of_many = sizes("--max-num-seqs", "512")
    assert (many - step_bytes, many) == (step_bytes, 2 * step_bytes)
    assert graphs_of_many == 2 * graph_bytes
    few = [sizes("--max-num-seqs", "4", "--max-num-batched-tokens", budget)[0] for budget in ("8192", "16384")]
    assert few[1] == 2 * few[0]
    assert few[0] < step_bytes
    drafts = sizes("--speculative-method", "ngram", "--num-speculative-tokens", "3")[0]
    assert 3.5 * step_bytes < drafts < 4 * step_bytes
    assert sizes("--enforce-eager") == (step_bytes, 0)


def test_rounded_weights_take_what_kernels_for_gpus_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, flags = written(tmp_path, "Llama 3.1 8B"), ("--quantization", "int8")
    of_cpu, of_gpu = (planned(capsys, model, "--memory", "80G", *flags, *more) for more in ((), ("--device", "cuda")))
    assert of_gpu["weights_bytes"] == of_cpu["weights_bytes"]
    assert main(["plan", model, "--device", "cuda", "--memory", "8900M"]) == 2
    error = capsys.readouterr().err
    assert f"--quantization int8 takes about {of_gpu['weights_bytes']:,} bytes, which does not fit either" in error


def test_one_of_several_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Llama 3.1 8B")
    whole, half = (planned(capsys, model, *GPU, *more) for more in ((), ("--tensor-parallel-size", "2")))
    assert half["weights_bytes"] * 2 == whole["weights_bytes"]
    assert half["bytes_per_token"] * 2 == whole["bytes_per_token"]
    # 16 ranks have 8 KV heads twice.
    many = planned(capsys, model, *GPU, "-tp", "16")
    assert many["bytes_per_token"] * 8 == whole["bytes_per_token"]
    # Logits are drawn from on the first rank, and no captured step has them.
    assert half["gpu"]["step_bytes"] == whole["gpu"]["step_bytes"]
    assert half["gpu"]["graph_bytes"] < whole["gpu"]["graph_bytes"] / 4
    assert (whole["gpu"]["tensor_parallel_size"], half["gpu"]["tensor_parallel_size"]) == (1, 2)
    assert main(["plan", model, *GPU, "--tensor-parallel-size", "2"]) == 0
    assert "Each of 2 GPUs, one of which is planned here: 74.51 GiB" in capsys.readouterr().out


def test_experts_of_several_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Qwen3 30B A3B")
    flags = (*GPU, "--tensor-parallel-size", "2")
    by_columns, by_expert = (planned(capsys, model, *flags, *more) for more in ((), ("--enable-expert-parallel",)))
    assert by_columns["weights_bytes"] == by_expert["weights_bytes"]
    whole = planned(capsys, model, *GPU)["weights_bytes"]
    # Each has the routers, of 48 layers, whole.
    assert 2 * by_expert["weights_bytes"] - whole == 48 * 128 * 2048 * 2


def test_the_rate_of_decoding_is_that_of_a_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three quarters of the bandwidth for weights but the table, and for cached tokens; a millisecond besides."""
    model, flags = written(tmp_path, "Llama 3.1 8B"), ("--max-num-seqs", "3", "--lengths", "1000,100000")
    plan = planned(capsys, model, "--gpu", "h100", *flags)
    num_bytes = plan["weights_bytes"] - 128256 * 4096 * 2
    for rate, length in zip(plan["decode_tokens_per_s"], (1000, 100_000), strict=True):
        seconds = (num_bytes + 3 * length * plan["bytes_per_token"]) / (0.75 * 3.35e12) + 1e-3
        assert rate == pytest.approx(3 / seconds, rel=1e-3)
    twice = planned(capsys, model, "--gpu", "h100", "--tensor-parallel-size", "2", *flags)
    for rate, other in zip(plan["decode_tokens_per_s"], twice["decode_tokens_per_s"], strict=True):
        assert 2 * (3 / other - 1e-3) == pytest.approx(3 / rate - 1e-3)
    # Where nothing runs, nothing is said; drafts are as often right as they are, which no plan knows.
    none = planned(capsys, model, "--gpu", "l4", "--lengths", "100000", "--max-model-len", "131072", code=1)
    assert none["decode_tokens_per_s"] == [None]
    drafts = ("--speculative-method", "draft", "--draft-model", model)
    assert "decode_tokens_per_s" not in planned(capsys, model, "--gpu", "h200", *drafts)
    assert "decode_tokens_per_s" not in planned(capsys, model, *GPU)


@pytest.mark.parametrize("flags", [(), ("--quantization", "int4"), ("--max-num-seqs", "64", "--max-model-len", "8192")])
def test_simulations_have_the_same_memory(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, "Llama 3.1 8B")
    options = {
        name[2:].replace("-", "_"): int(value) if value.isdigit() else value
        for name, value in zip(flags[::2], flags[1::2], strict=True)
    }
    engine = engine_on_hardware({"model": model, **options}, "h100")
    assert planned(capsys, model, "--gpu", "h100", *flags)["arena_bytes"] == engine.settings(options).memory.num_bytes


def test_a_gpu_may_have_nothing_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, written(tmp_path, "Llama 3.1 8B"), "--device", "cuda", "--memory", "17G", code=1)
    assert (plan["longest"], plan["arena_bytes"]) == (0, 0)
    assert plan["never"].startswith("Sequences of more than 0 tokens")


def test_what_is_estimated_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Qwen3 0.6B")
    assert any(
        note.startswith("The memory of steps on the GPU is estimated") for note in planned(capsys, model, *GPU)["notes"]
    )
    assert not any("GPU" in note for note in planned(capsys, model, "--memory", "80G")["notes"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "h99"], "gpu must be one of b200, h100, h200, a100, l40s, l4, got 'h99'"),
        (["--gpu", "cpu"], "gpu must be one of b200, h100, h200, a100, l40s, l4, got 'cpu'"),
        (["--gpu", "l4", "--memory", "3G"], "gpu must not be given with memory (3,000,000,000)"),
        (["--gpu", "l4", "--device", "cpu"], "device must be 'cuda' or 'auto' with gpu 'l4', got 'cpu'"),
        (["--gpu", "l4", "--gpu-memory-utilization", "1.5"], "gpu_memory_utilization must be"),
        (["--gpu", "l4", "--tensor-parallel-size", "3"], "tensor_parallel_size must divide the"),
        (["--memory", "3G", "--tensor-parallel-size", "2"], "tensor_parallel_size must be 1 with device 'auto', got 2"),
        (["--gpu", "l4", "--kv-cache-memory-bytes", "30G"], "kv_cache_memory_bytes (30,000,000,000) is more than"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert shown.err.count("\n") == 1
