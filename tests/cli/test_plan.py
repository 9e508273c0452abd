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
from quire.errors import ConfigError, UnsupportedModel
from quire.models.checkpoint import locate
from quire.models.gguf.reader import GGUFFile
from tests.conformance.checkpoints import save_checkpoint
from tests.models.gguf.writer import write_gguf
from tests.models.mtp import save_mtp_checkpoint
from tests.models.published import CONFIGS

MIB = 1 << 20


def planned(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> dict[str, Any]:
    """Run the command with --json and return what it printed."""
    assert main(["plan", *flags, "--json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["fits"] is (code == 0)
    return result


def written(folder: Path, name: str, **changes: Any) -> str:
    """Write a published configuration, and return the file's name."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name] | changes))
    return str(path)


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


DRAFTED = [
    ("qwen3", "llama3", {"kv_cache_memory_bytes": 8_000_000}),
    ("qwen3", "llama3", {"num_kv_blocks": 77, "max_model_len": 300, "block_size": 5, "kv_cache_dtype": "int8"}),
    ("falcon-h1", "mistral-window", {"kv_cache_memory_bytes": 8_000_000, "dtype": "bfloat16"}),
    ("lfm2", "qwen3.5", {"kv_cache_memory_bytes": 4 * MIB}),
    ("gemma3", "granite4", {"kv_cache_memory_bytes": 8_000_001, "kv_cache_dtype": "fp8"}),
    ("gemma3", "gemma3", {"num_kv_blocks": 90}),
]


def pair(folder: Path, target: str, draft: str) -> list[str]:
    """Write tiny checkpoints of two families, and return their folders."""
    return [str(save_checkpoint(family, folder / role)) for role, family in (("target", target), ("draft", draft))]


@pytest.mark.parametrize(("target", "draft", "options"), DRAFTED, ids=str)
def test_a_draft_model_is_planned_as_the_engine_allocates_it(
    target: str, draft: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = pair(tmp_path, target, draft)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    plan = planned(capsys, models[0], "--speculative-method=draft", f"--draft-model={models[1]}", *flags)
    alone = [planned(capsys, model, *flags)["groups"] for model in models]
    assert [group["is_draft"] for group in plan["groups"]] == [False] * len(alone[0]) + [True] * len(alone[1])
    sizes = ("kind", "num_layers", "bytes_per_block", "bytes_per_sequence")
    assert [[group[size] for size in sizes] for group in plan["groups"]] == [
        [group[size] for size in sizes] for groups in alone for group in groups
    ]
    drafts = {"speculative_method": "draft", "draft_model": models[1]}
    with closing(LLM(models[0], num_threads=1, skip_tokenizer_init=True, **drafts, **options)) as llm:
        engine = llm.engine
        runner = engine.executor._runner  # type: ignore[attr-defined]
        storages = [*runner._storages, *runner._draft._storages]
        assert {storage.data.untyped_storage().nbytes() for storage in storages} == {plan["arena_bytes"]}
        assert len({storage.data.untyped_storage().data_ptr() for storage in storages}) == 1
        blocks = [group["bytes_per_block"] or group["bytes_per_sequence"] for group in plan["groups"]]
        assert [storage.data[0].nbytes for storage in storages] == blocks
        layout = engine.scheduler.memory.arena.layout
        assert layout.num_bytes == plan["arena_bytes"]
        assert [count * layout.num_slabs for count in layout.blocks_per_slab] == [
            group["num_blocks"] for group in plan["groups"]
        ]
        assert plan["kv_cache_dtype"] == engine.config.kv_cache_dtype
        assert plan["max_model_len"] == engine.config.max_model_len
        assert plan["bytes_per_token"] * engine.config.block_size == engine.config.bytes_per_block


def test_an_mtp_head_is_planned_as_the_engine_allocates_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_mtp_checkpoint(tmp_path, noise=0.1, head_noise=0.1))
    flags = ("--speculative-method=mtp", f"--kv-cache-memory-bytes={8 * MIB}", "--dtype=float32")
    plan, alone = planned(capsys, model, *flags), planned(capsys, model, *flags[1:])
    assert [group["kind"] for group in plan["groups"] if group["is_draft"]] == ["all tokens", "recurrent state"]
    assert plan["groups"][-2]["bytes_per_token"] * 2 == alone["groups"][0]["bytes_per_token"]  # one layer, not two
    assert plan["groups"][-1]["bytes_per_sequence"] == 64 * 4
    assert plan["draft_architecture"] == "MTP head"
    memory = ("--memory=1G", "--dtype=float32")
    weights = [planned(capsys, model, *memory, *more)["weights_bytes"] for more in ([], [flags[0]])]
    # Attention with gates and grouped heads, the gated MLP, and the projection of both inputs.
    assert weights[1] - weights[0] == 4 * (64 * 16 * (3 * 4 + 2 * 2) + 3 * 64 * 96 + 2 * 64 * 64)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 8 * MIB, "dtype": "float32", "skip_tokenizer_init": True}
    with closing(LLM(model, num_threads=1, speculative_method="mtp", **options)) as llm:
        layout = llm.engine.scheduler.memory.arena.layout
        assert layout.num_bytes == plan["arena_bytes"]
        sizes = [group["bytes_per_block"] or group["bytes_per_sequence"] for group in plan["groups"]]
        assert list(layout.block_bytes) == sizes
    assert main(["plan", str(save_checkpoint("qwen3", tmp_path / "other")), flags[0]]) != 0
    assert "head for multi-token prediction" in capsys.readouterr().err


@pytest.mark.parametrize(("target", "draft"), [("qwen3", "llama3"), ("gemma3", "granite4")])
def test_with_the_least_that_a_plan_names_two_models_start(
    target: str, draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = pair(tmp_path, target, draft)
    drafts = ("--speculative-method", "draft", "--draft-model", models[1])
    never = planned(capsys, models[0], *drafts, "--kv-cache-memory-bytes", "300K", code=1)["never"]
    found = re.search(r"at least (\d+)", never)
    assert found is not None
    least = int(found[1])
    assert planned(capsys, models[0], *drafts, "--kv-cache-memory-bytes", str(least))["fits"]
    options = {"num_threads": 1, "skip_tokenizer_init": True, "speculative_method": "draft", "draft_model": models[1]}
    with pytest.raises(ConfigError, match=str(least)):
        LLM(models[0], kv_cache_memory_bytes=least - 1, **options)
    LLM(models[0], kv_cache_memory_bytes=least, **options).close()


def test_the_weights_of_both_models_come_off_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "draft").mkdir()
    model, draft = written(tmp_path, "Llama 3.1 8B"), written(tmp_path / "draft", "Llama 3.1 8B", num_hidden_layers=4)
    memory = ("--memory", "80G", "--max-model-len", "8192")
    each = [planned(capsys, one, *memory)["weights_bytes"] for one in (model, draft)]
    drafts = ("--speculative-method", "draft", "--draft-model", draft)
    plan = planned(capsys, model, *memory, *drafts)
    assert plan["weights_bytes"] == sum(each)
    assert (plan["draft_model"], plan["draft_architecture"]) == (draft, "LlamaForCausalLM")
    # A token takes what 32 layers keep, and 4 more; a block is both models' 16 tokens.
    assert plan["bytes_per_token"] == (128 << 10) * 36 // 32
    slabs = (80 * 10**9 - sum(each)) // 2 // (36 << 16)
    assert plan["arena_bytes"] <= slabs * (36 << 16)
    assert plan["arena_bytes"] > (slabs - 9) * (36 << 16)
    assert main(["plan", model, *memory, *drafts]) == 0
    shown = capsys.readouterr().out
    assert "all tokens (drafts)" in shown
    assert "to make drafts" in " ".join(shown.split())
    quantised = planned(capsys, model, *memory, *drafts, "--quantization", "int8")
    assert quantised["weights_bytes"] < plan["weights_bytes"] * 0.6
    given = planned(capsys, model, *memory, *drafts, "--weights-bytes", "20G")
    assert (given["weights_bytes"], given["is_weights_estimate"]) == (20 * 10**9, False)


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({"vocab_size": 32000}, [], "has a vocabulary of 32000 tokens, and"),
        ({"max_position_embeddings": 4096}, [], "was made for contexts of 4096 tokens, and max_model_len is 131072"),
        ({}, ["--speculative-method", "ngram"], "needs speculative_method 'draft', got 'ngram'"),
    ],
)
def test_a_draft_model_that_does_not_go_with_the_target_is_refused(
    changes: dict[str, Any], flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "draft").mkdir()
    model, draft = written(tmp_path, "Llama 3.1 8B"), written(tmp_path / "draft", "Llama 3.1 8B", **changes)
    assert main(["plan", model, "--draft-model", draft, *(flags or ["--speculative-method", "draft"])]) == 2
    assert words in capsys.readouterr().err


def test_too_small_a_budget_is_what_the_engine_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """With the least that the plan names, and only with it, an engine starts."""
    plan = planned(capsys, "bundled", "--kv-cache-memory-bytes", "1M", code=1)
    assert plan["longest"] == 464
    assert "464 tokens, prompt and output together, never fit" in plan["never"]
    assert (
        "max_model_len=1024 needs kv_cache_memory_bytes of at least 2129920, or lower max_model_len to 464"
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
    assert re.search(r"--quantization int8 takes about 4,5\d\d,\d{3} bytes, which does not fit either", error)
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
    assert "Give --memory or --kv-cache-memory-bytes" in shown
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


def test_the_transcript_of_the_documents_is_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "memory" / "sizing.md").read_text(encoding="utf-8")
    transcript = next(block for block in page.split("```") if block.startswith("\n$ quire plan "))
    command, _, shown = transcript.removeprefix("\n$ ").partition("\n")
    (tmp_path / "gemma-3-27b").mkdir()
    written(tmp_path / "gemma-3-27b", "Gemma 3 27B")
    monkeypatch.chdir(tmp_path)
    main(command.split()[1:])
    assert capsys.readouterr().out == shown


def test_weights_of_a_gguf_file_take_what_the_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(locate("bundled"), tmp_path / "model.gguf", lambda *_: GGMLQuantizationType.Q8_0, pre="gpt-2")
    found = planned(capsys, str(path), "--memory", "1GiB")
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["weights_bytes"] == sum(tensor.num_bytes for tensor in GGUFFile.open(path).tensors.values())
    assert found["is_weights_estimate"] is False
