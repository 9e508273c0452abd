"""`quire plan` says what an engine would have, to the byte, and why something does not fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from quire.cli.main import main
from quire.engine.llm import LLM
from quire.errors import UnsupportedModel
from quire.models.checkpoints.checkpoint import locate
from quire.models.gguf.reader import GGUFFile
from tests.cli.plans import MIB, planned, written
from tests.conformance.checkpoints import save_checkpoint
from tests.models.gguf.writer import write_gguf


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_memory_bytes": 16_000_000},
        {"kv_cache_memory_bytes": 9 * MIB + 1, "block_size": 5, "dtype": "float32"},
        {"num_kv_blocks": 77, "max_model_len": 300},
        {"kv_cache_memory_bytes": 3 * MIB, "block_size": 64, "dtype": "float16"},
        {"kv_cache_memory_bytes": 3 * MIB, "kv_cache_dtype": "int8"},
        {"kv_cache_memory_bytes": 2 * MIB + 1, "block_size": 5, "dtype": "float32", "kv_cache_dtype": "int8"},
        {"num_kv_blocks": 77, "max_model_len": 300, "kv_cache_dtype": "fp8"},
        {"num_kv_blocks": 77, "max_model_len": 300, "kv_cache_dtype": "float32"},
    ],
    ids=str,
)
def test_the_engine_allocates_what_was_planned(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    plan = planned(capsys, "bundled", *flags)
    with closing(LLM("bundled", num_threads=1, **options)) as llm:
        engine = llm.engine
        storages = engine.executor._runner._storages  # type: ignore[attr-defined]
        assert [storage.data.nbytes for storage in storages] == [plan["arena_bytes"]]
        assert [group["bytes_per_block"] for group in plan["groups"]] == [storages[0].data[0].nbytes]
        assert [group["num_blocks"] for group in plan["groups"]] == [engine.config.num_blocks]
        assert plan["kv_cache_dtype"] == engine.config.kv_cache_dtype
        assert plan["max_model_len"] == engine.config.max_model_len
        at_once = {each["num_tokens"]: each["concurrency"] for each in plan["lengths"]}
        assert at_once[engine.config.max_model_len] == engine.config.max_concurrency


def test_too_small_a_budget_is_what_the_engine_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """With the least that the plan names, and only with it, an engine starts."""
    plan = planned(capsys, "bundled", "--kv-cache-memory-bytes", "1M", code=1)
    assert plan["longest"] == 464
    assert "464 tokens, prompt and output together, never fit" in plan["never"]
    assert (
        "max_model_len=1024 needs kv_cache_memory_bytes of at least 2129920 bytes, or lower max_model_len to 464"
        in plan["never"]
    )
    command = ["generate", "--prompt", "a", "--max-tokens", "1", "--kv-cache-memory-bytes", "2129919"]
    assert main([*command, "--max-model-len", "1024"]) == 2
    assert "2129920" in capsys.readouterr().err
    assert planned(capsys, "bundled", "--kv-cache-memory-bytes", "2129920")["longest"] == 1024


def test_without_a_length_the_engine_serves_what_the_plan_names(capsys: pytest.CaptureFixture[str]) -> None:
    (note,) = (
        note
        for note in planned(capsys, "bundled", "--kv-cache-memory-bytes", "1500K", code=1)["notes"]
        if note.startswith("Without max_model_len")
    )
    assert note.startswith("Without max_model_len, the engine serves contexts of 704 tokens in this memory")
    assert main(["generate", "--prompt", "a", "--max-tokens", "1", "--kv-cache-memory-bytes", "1500K"]) == 0
    assert "Context: 704 of the model's 1,024 tokens fit into this memory" in capsys.readouterr().err


def test_weights_that_do_not_fit_have_smaller_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "4MiB"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"--quantization int8 takes about 4,7\d\d,\d{3} bytes, which does not fit either", error)
    assert re.search(r"--quantization int4 takes about 3,1\d\d,\d{3} bytes, which fits", error)
    assert main(["plan", "--memory", "3MiB", "--quantization", "int8"]) == 2
    error = capsys.readouterr().err
    assert "quantization int8" not in error
    assert "--quantization int4" in error


def test_the_weights_come_off_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Llama 3.1 8B")
    plan = planned(capsys, model, "--memory", "80G", "--max-model-len", "8192")
    assert plan["is_weights_estimate"] is True
    assert plan["weights_bytes"] == pytest.approx(16.06e9, rel=0.01)
    # Half of the rest, in blocks of 2 MiB, one of which is the null block.
    blocks = (80 * 10**9 - plan["weights_bytes"]) // 2 // (2 * MIB)
    assert plan["arena_bytes"] == blocks * 2 * MIB
    assert plan["groups"][0]["num_blocks"] == blocks - 1
    given = planned(capsys, model, "--memory", "80G", "--weights-bytes", "16G", "--kv-cache-memory-fraction", "1")
    assert (given["is_weights_estimate"], given["arena_bytes"]) == (False, 64 * 10**9 // (2 * MIB) * 2 * MIB)


def test_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Gemma 3 27B")
    plan = planned(capsys, model, "--kv-cache-memory-bytes", "16G")
    assert [group["kind"] for group in plan["groups"]] == ["window of 1024 tokens", "all tokens"]
    # 1,023 tokens before a query and its own touch 65 blocks of 52 layers; a block of one layer has 128 KiB.
    assert plan["sequence_bytes"] == (65 * 52 + 8192 * 10) * 128 << 10
    assert main(["plan", model, "--kv-cache-memory-bytes", "16G"]) == 0
    assert "A token takes 496.00 KiB in all groups together." in capsys.readouterr().out


def test_states_have_a_row_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "LFM2 1.2B")
    plan = planned(capsys, model, "--kv-cache-memory-bytes", "1G", "--lengths", "1000,4096")
    assert [each["num_tokens"] for each in plan["lengths"]] == [1000, 4096]
    tokens, state = plan["groups"]
    assert (tokens["bytes_per_token"], tokens["bytes_per_sequence"]) == (12 << 10, None)
    assert (state["kind"], state["bytes_per_sequence"]) == ("recurrent state", 80 << 10)
    assert plan["sequence_bytes"] == (4096 * 12 + 80) << 10
    assert main(["plan", model, "--memory", "16G"]) == 0
    shown = capsys.readouterr().out
    assert "80.00 KiB" in shown
    assert "Weights: 2.18 GiB (an estimate from parameters and dtype)" in shown


def test_every_layer_may_be_in_both_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, written(tmp_path, "Falcon-H1 0.5B"), "--kv-cache-memory-bytes", "1G")
    assert [(group["kind"], group["num_layers"]) for group in plan["groups"]] == [
        ("all tokens", 36),
        ("recurrent state", 36),
    ]
    # 24 heads of 64 x 128 in float32, and three inputs of 1,792 values.
    assert plan["sequence_bytes"] == 36 * (16384 * 512 + 24 * 64 * 128 * 4 + 3 * 1792 * 2)


def test_a_state_that_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Null blocks take a slab of 21.3 MiB, a state another: what is left is for blocks."""
    model = written(tmp_path, "Granite 4.0 H-350M")
    plan = planned(capsys, model, "--kv-cache-memory-bytes", "60M", code=1)
    assert plan["longest"] == 0
    assert "most of them for 'recurrent state'" in plan["never"]


def test_states_are_no_less_than_the_seats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine takes no more memory than its seats can fill, with blocks and with states and their snapshots."""
    few = ("--memory", "16G", "--max-num-seqs", "4", "--max-model-len", "64")
    # Four sequences of four blocks, and the null block.
    blocks = planned(capsys, written(tmp_path, "Qwen3 0.6B"), *few)
    assert blocks["arena_bytes"] == (4 * 4 + 1) * 16 * 112 << 10
    hybrid = planned(capsys, written(tmp_path, "LFM2 1.2B"), *few)
    # Slabs of five blocks or twelve states: four for the blocks, one for states and snapshots, one for null blocks.
    assert hybrid["arena_bytes"] == 6 * 960 << 10
    assert hybrid["lengths"][-1]["concurrency"] >= 4


def test_without_a_budget_sizes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "bundled")
    assert [plan[name] for name in ("arena_bytes", "weights_bytes", "longest", "never")] == [None] * 4
    assert main(["plan"]) == 0
    shown = capsys.readouterr().out
    assert "Give --memory, --gpu or --kv-cache-memory-bytes" in shown
    assert "at once" not in shown


def test_a_dtype_that_is_not_stated_is_assumed_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Llama 2 7B", torch_dtype=None)
    assert "states no dtype" in planned(capsys, model)["notes"][0]
    assert planned(capsys, model, "--dtype", "float32")["notes"] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["./no-such-folder"], "no-such-folder"),
        (["--kv-cache-dtype", "int3"], "kv_cache_dtype must be one of auto, bfloat16, float16, float32, fp8, int8"),
        (["--max-model-len", "1025"], "max_model_len (1025) is more than the model's limit of 1024"),
        (["--lengths", "5,1025"], "lengths must be from 1 to max_model_len (1024), got 1025"),
        (["--memory", "1M"], "memory (1,000,000 bytes) does not hold the weights (6,9"),
        (["--memory", "0"], "memory_bytes must be at least 1, got 0"),
        (["--memory", "1G", "--kv-cache-memory-bytes", "2G"], "kv_cache_memory_bytes (2,000,000,000) is more than"),
        (["--weights-bytes", "1G"], "weights_bytes is taken off memory, which is not given"),
        (["--block-size", "0"], "block_size must be an integer of at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer from 1"),
        ({"hidden_size": None}, "lacks the field hidden_size"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be an integer from 1 to 1024"),
    ],
)
def test_a_configuration_that_cannot_be_read_names_the_field(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", written(tmp_path, "Llama 2 7B", **changes)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["OddForCausalLM"]}, "the architecture 'OddForCausalLM' is not implemented"),
        ({"quantization_config": {"quant_method": "hqq"}}, "by the method 'hqq', which is not served"),
    ],
)
def test_a_model_that_the_engine_does_not_run_is_refused_as_by_the_engine(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_checkpoint("llama3", tmp_path / "llama3")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModel) as refused:
        LLM(str(folder), num_threads=1, skip_tokenizer_init=True)
    assert words in str(refused.value)
    capsys.readouterr()
    drafts = ("--speculative-method", "draft", "--draft-model")
    for arguments in ([str(folder)], ["bundled", *drafts, str(folder)]):
        assert main(["plan", *arguments]) == 2
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("", f"quire: error: {refused.value}\n")


def test_a_revision_is_for_the_hub_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in (written(tmp_path, "Llama 2 7B"), str(tmp_path)):
        assert main(["plan", model]) == 0
        assert main(["plan", model, "--revision", "main"]) == 2
        assert "revision 'main' cannot be honoured" in capsys.readouterr().err


def test_a_plan_takes_no_tensors() -> None:
    script = (
        "import sys\nfrom quire.cli.main import main\nassert main(['plan', '--memory', '4G', '--json']) == 0\n"
        "print([name for name in ('torch', 'numpy', 'safetensors.torch') if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stderr == "[]\n"


def test_the_transcripts_of_the_documents_are_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "memory" / "sizing.md").read_text(encoding="utf-8")
    transcripts = [block for block in page.split("```") if block.startswith("\n$ quire plan ")]
    assert len(transcripts) == 2
    for folder, name in (("gemma-3-27b", "Gemma 3 27B"), ("llama-3.1-8b", "Llama 3.1 8B")):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, name)
    monkeypatch.chdir(tmp_path)
    for transcript in transcripts:
        command, _, shown = transcript.removeprefix("\n$ ").partition("\n")
        main(command.split()[1:])
        assert capsys.readouterr().out == shown


def test_weights_of_a_gguf_file_take_what_the_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(locate("bundled"), tmp_path / "model.gguf", lambda *_: GGMLQuantizationType.Q8_0, pre="gpt-2")
    found = planned(capsys, str(path), "--memory", "1GiB")
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["weights_bytes"] == sum(tensor.num_bytes for tensor in GGUFFile.open(path).tensors.values())
    assert found["is_weights_estimate"] is False


def test_a_plan_is_of_the_method_that_the_checkpoint_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "1GiB", "--quantization", "fp8"]) == 2
    assert "got 'fp8': the checkpoint has plain weights" in capsys.readouterr().err
