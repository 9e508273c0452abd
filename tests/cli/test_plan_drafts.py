"""`quire plan` of two models, or of a model with an MTP head: as the engine allocates them, or refused."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.engine.llm import LLM
from quire.errors import ConfigError
from tests.cli.plans import MIB, planned, written
from tests.conformance.checkpoints import save_checkpoint
from tests.models.mtp import save_mtp_checkpoint

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
        storages = [*runner._storages, *runner.draft._storages]
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
