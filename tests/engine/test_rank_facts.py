"""Ranks that join compare versions, options and files: another one on any rank is an error on all, before loading."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig, option_sections
from quire.distributed import launch
from quire.engine.startup.rank_facts import check_equal, code_digest, rank_facts
from quire.errors import ConfigError, RanksDiffer
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.models.loading.weight_samples import MOST_DIGESTS, MOST_PIECES, PIECE_BYTES, sample_weights
from quire.models.tensors.stored_tensor import StoredTensor
from tests.conformance.test_draft_model import noisy_copy
from tests.engine.test_adapters import World
from tests.engine.test_ranks import OPTIONS, children, start
from tests.kvstore.servers import free_port

WAIT_S = 300
# Options that ranks may have apart: the files that some name are compared by their contents.
OWN = {
    *("model", "tokenizer", "revision", "chat_template", "lora_modules", "record_memory", "kv_events_config"),
    *("device", "kernels", "num_threads", "cpu_bind", "allowed_local_media_path", "allowed_media_domains", "mmproj"),
}


def test_every_option_is_compared_but_those_that_are_declared_otherwise() -> None:
    """A new option is compared unless its declaration says otherwise, which this list then must say too."""
    compared = EngineConfig().options_of_ranks()
    assert option_sections().keys() - compared.keys() == OWN
    assert EngineConfig.from_options(prefix_cache_dir="a").options_of_ranks()["prefix_cache_dir"] is True
    facts = {name: (name, value) for name, value in compared.items()}
    check_equal([facts, facts])
    for name in compared:
        with pytest.raises(RanksDiffer, match=rf"^{name} must be the same .* on rank 0, 'other' on rank 2$") as refused:
            check_equal([facts, facts, {**facts, name: (name, "other")}])
        assert refused.value.field == name


def test_something_that_one_rank_lacks_is_a_difference() -> None:
    both, more = {"x": ("model", "1")}, {"x": ("model", "1"), "y": ("tokenizer", "2")}
    for ranks, words in (([both, more], "absent on rank 0, '2' on rank 1"), ([more, both], "'2' on rank 0, absent on")):
        with pytest.raises(RanksDiffer, match=words) as refused:
            check_equal(ranks)
        assert refused.value.field == "tokenizer"


# ---- samples of weights ----


def test_noise_in_any_tensor_is_found(tmp_path: Path) -> None:
    """Every tensor of the bundled model in turn; a checkpoint in several files has the digests of a single file."""
    tensors = load_file(locate("bundled") / "model.safetensors")
    plain = sample_weights(Checkpoint.open("bundled").tensors)
    assert [*plain] == sorted(tensors)
    folder = tmp_path / "model"
    shutil.copytree(locate("bundled"), folder)
    for name, tensor in tensors.items():
        noisy = tensor.float() * (1 + 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
        save_file({**tensors, name: noisy.to(tensor.dtype)}, folder / "model.safetensors")
        found = sample_weights(Checkpoint.open(str(folder)).tensors)
        assert {key for key in plain if plain[key] != found[key]} == {name}


def test_pieces_of_a_large_tensor_are_read_at_both_ends_and_between(tmp_path: Path) -> None:
    size = 40 * PIECE_BYTES
    file = tmp_path / "weights"
    content = bytearray(size + 100)

    def digest() -> dict[str, str]:
        file.write_bytes(content)
        return sample_weights({"a": StoredTensor(file, "U8", (size,), 50, size)})

    plain, found = digest(), 0
    for piece in range(40):
        content[50 + piece * PIECE_BYTES + 7] ^= 1
        found += digest() != plain
        content[50 + piece * PIECE_BYTES + 7] ^= 1
    assert found == MOST_PIECES
    for place in (0, 49, size + 50, size + 99):  # other bytes of the file
        content[place] ^= 1
        assert digest() == plain
        content[place] ^= 1
    for place in (50, size + 49):
        content[place] ^= 1
        assert digest() != plain
        content[place] ^= 1


def test_many_tensors_share_digests(tmp_path: Path) -> None:
    file, count = tmp_path / "weights", 3 * MOST_DIGESTS
    content = bytearray(4 * count)
    file.write_bytes(content)
    tensors = {f"{idx:05}": StoredTensor(file, "U8", (4,), 4 * idx, 4) for idx in range(count)}
    plain = sample_weights(tensors)
    assert len(plain) == MOST_DIGESTS
    content[4 * 3001] ^= 1
    file.write_bytes(content)
    found = sample_weights(tensors)
    assert [key for key in plain if plain[key] != found[key]] == ["03000"]
    assert sample_weights({}) == {}


# ---- processes ----


class Join(NamedTuple):
    """Two ranks that must not join.

    Args:
        name: name of the case.
        words: what the error says.
        field: option that it names.
        first, second: options of the ranks, besides the common ones.
        environment: variables of rank 1.
        version: digest of Quire's code on rank 1; None for rank 0's.
        kind: type of the error; another one than `RanksDiffer` is rank 1's own, and rank 0's names it.
    """

    name: str
    words: str
    field: str | None
    first: Mapping[str, Any] = MappingProxyType({})
    second: Mapping[str, Any] = MappingProxyType({})
    environment: Mapping[str, str] = MappingProxyType({})
    version: str | None = None
    kind: str = "RanksDiffer"


JOINER = """
import json, os, sys
from quire import LLM
from quire.engine.startup import rank_facts
honest = rank_facts.code_digest
rank, joins = int(sys.argv[1]), json.loads(sys.argv[2])
for options, environment, port, version in joins:
    rank_facts.code_digest = (lambda: version) if version else honest
    before = dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **environment)
    try:
        LLM(**options).close()
        print(json.dumps(["joined", "", None]), flush=True)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error), getattr(error, "field", None)]), flush=True)
    os.environ.clear()
    os.environ.update(before)
"""


def joins_of(folder: Path) -> list[Join]:
    """Return the cases, with their files."""
    world, bundled = World(folder / "world"), locate("bundled")
    noisy = str(noisy_copy(bundled, folder / "noisy", 0.02))
    other_text = folder / "tokenizer"
    shutil.copytree(bundled, other_text)
    with (other_text / "tokenizer.json").open("a") as file:
        file.write("\n")
    templates = [folder / "one.jinja", folder / "other.jinja"]
    for idx, path in enumerate(templates):
        path.write_text("{{ messages }}" + str(idx))
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    skips = {"skip_tokenizer_init": True}
    adapted = {"model": world.model, "skip_tokenizer_init": True, "enable_lora": True}
    merged = {"model": world.model, "skip_tokenizer_init": True, "merge_lora": True}
    one, two = ({"lora_modules": [f"one={world.paths[name]}"]} for name in ("one", "two"))
    draft = {"speculative_method": "draft", "draft_model": "bundled"}
    return [
        Join("weights", "the tensor 'model.embed_tokens.weight' of model must be", "model", {}, {"model": noisy}),
        Join("weights of stages", "the tensor .* of model must be", "model", stages, {**stages, "model": noisy}),
        Join("draft model", "the tensor .* of draft_model", "draft_model", draft, {**draft, "draft_model": noisy}),
        Join("config", "config.json of model", "model", skips, {**skips, "model": world.model}),
        Join("tokenizer", "tokenizer.json of the tokenizer", "tokenizer", {}, {"tokenizer": str(other_text)}),
        Join(
            "chat template",
            "the file of chat_template",
            "chat_template",
            {"chat_template": str(templates[0])},
            {"chat_template": str(templates[1])},
        ),
        Join("adapter", "adapter_model.safetensors of the adapter 'one'", "lora_modules", adapted | one, adapted | two),
        Join("merged adapter", "of the adapter 'one'", "lora_modules", merged | one, merged | two),
        Join("option", "max_num_seqs must be the same on all ranks: 8 on .* 16 on rank 1", "max_num_seqs",
             {"max_num_seqs": 8}, {"max_num_seqs": 16}),
        Join("store", "prefix_cache_dir must be the same .* False on rank 0, True on rank 1", "prefix_cache_dir", {},
             {"prefix_cache_dir": str(folder / "cache")}),
        Join("grid", "tensor_parallel_size must be .* 2 on rank 0, 1 on rank 1", "tensor_parallel_size", {}, stages),
        Join("size", "must be the number of processes that torchrun", "tensor_parallel_size", {},
             {"tensor_parallel_size": 4}, kind="ConfigError"),
        Join("cores", "cpu_bind has cores", "cpu_bind", {}, {"cpu_bind": "900-901"}, kind="ConfigError"),
        Join("missing", "model '/nowhere' does not exist", "model", {}, {"model": "/nowhere"}, kind="CheckpointError"),
        Join("kernels", "the kernels and their level .* 'torch, .* on rank 1", "kernels", {}, {"kernels": "torch"}),
        Join("level", "the kernels and their level .* 'native portable, .* on rank 1", "kernels",
             environment={"QUIRE_MAX_CPU_LEVEL": "portable"}),
        Join("version", "the version of Quire must be the same .* 'other' on rank 1", None, version="other"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Join, list[list[Any]]]]:
    """Return the cases, each with what the ranks have raised, in two processes that join once for each case."""
    cases = joins_of(tmp_path_factory.mktemp("joins"))
    common: dict[str, Any] = {"tensor_parallel_size": 2, "num_kv_blocks": 40, **OPTIONS}
    ports = [free_port() for _ in cases]

    def joins(rank: int) -> str:
        given = [(join.second if rank else join.first, join) for join in cases]
        return json.dumps(
            [
                [{**common, **options}, dict(join.environment) if rank else {}, port, join.version if rank else None]
                for (options, join), port in zip(given, ports, strict=True)
            ]
        )

    processes = [
        subprocess.Popen([sys.executable, "-c", JOINER, str(rank), joins(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=WAIT_S)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = [[json.loads(line) for line in lines if line.startswith("[")] for lines in outputs]
    return [*zip(cases, map(list, zip(*told, strict=True)), strict=True)]


def test_ranks_that_differ_are_refused_on_every_rank(outcomes: list[tuple[Join, list[list[Any]]]]) -> None:
    for join, told in outcomes:
        assert len(told) == 2
        for rank, (kind, message, field) in enumerate(told):
            assert (kind, field) == (join.kind, join.field), (join.name, told)
            assert re.search(join.words, message), (join.name, told)
            assert message.startswith("rank 1: ") == (kind != "RanksDiffer" and rank == 0), (join.name, told)


def test_a_process_of_quire_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkpoint that is replaced while the ranks start."""
    noisy = str(noisy_copy(locate("bundled"), tmp_path / "noisy", 0.02))
    honest = launch.start_ranks

    def start_with_another(config: Any, options: dict[str, Any], program: str, compare: Any) -> Any:
        return honest(config, {**options, "model": noisy}, program, compare)

    monkeypatch.setattr("quire.engine.startup.start.start_ranks", start_with_another)
    before = children()
    with pytest.raises(RanksDiffer, match=r"the tensor .* on rank 0, .* on rank 1"):
        start()
    assert children() == before


def test_another_module_or_name_is_another_version(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        shutil.rmtree(tmp_path, ignore_errors=True)
        (tmp_path / "part").mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / "part" / f"{name}.py").write_text(text)
        return code_digest(tmp_path)

    digests = [digest(a="x", b="y"), digest(a="x", b="z"), digest(a="xy", b=""), digest(a="x", c="y"), digest(a="x")]
    assert len({*digests}) == 5
    assert digest(a="x", b="y") == digests[0]


def test_facts_are_json() -> None:
    facts = rank_facts(EngineConfig.from_options(tensor_parallel_size=2))
    assert json.loads(json.dumps(facts)) == {name: [*fact] for name, fact in facts.items()}
    check_equal([json.loads(json.dumps(facts))] * 2)
    with pytest.raises(ConfigError, match="does not exist"):
        rank_facts(EngineConfig.from_options(tensor_parallel_size=2, model="/nowhere"))
