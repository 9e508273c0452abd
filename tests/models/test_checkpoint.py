"""Checkpoints: what is found, and what every kind of damage is called."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils._paths import filter_repo_objects
from safetensors.torch import save_file

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.checkpoints import checkpoint
from quire.models.checkpoints.checkpoint import BUNDLED, HUB_FILES, HUB_IGNORED, Checkpoint, locate, read_config
from quire.models.checkpoints.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS
from quire.models.loading.loading import load_decoder

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint in one file."""
    write_json(tmp_path / "config.json", CONFIG)
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A whole checkpoint in two shards."""
    write_json(tmp_path / "config.json", CONFIG)
    weight_map = {}
    for shard_idx, (name, tensor) in enumerate(TENSORS.items(), start=1):
        weight_map[name] = f"model-0000{shard_idx}-of-00002.safetensors"
        save_file({name: tensor}, tmp_path / weight_map[name])
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return tmp_path


def test_a_single_file_is_indexed(folder: Path) -> None:
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.folder == folder
    assert checkpoint.config == CONFIG
    assert {name: (t.dtype, t.shape) for name, t in checkpoint.tensors.items()} == {
        "a.weight": ("F32", (2, 3)),
        "b.weight": ("BF16", (4,)),
    }


def test_shards_are_indexed(sharded: Path) -> None:
    tensors = Checkpoint.open(str(sharded)).tensors
    assert {name: t.path.name for name, t in tensors.items()} == {
        "a.weight": "model-00001-of-00002.safetensors",
        "b.weight": "model-00002-of-00002.safetensors",
    }


def test_shards_may_be_links_out_of_the_folder(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """That is how a hub cache keeps them."""
    blobs = tmp_path_factory.mktemp("blobs")
    for shard in sharded.glob("*.safetensors"):
        shard.rename(blobs / shard.name)
        shard.symlink_to(blobs / shard.name)
    assert set(Checkpoint.open(str(sharded)).tensors) == set(TENSORS)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, (2,)),
        (None, [2, 5], (2, 5)),
        (None, None, ()),
        (7, 2, (7,)),
        ([7, 8], 2, (7, 8)),
        ("absent", 2, (2,)),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    folder: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    write_json(folder / "config.json", CONFIG | {"eos_token_id": config})
    if generation != "absent":
        write_json(folder / "generation_config.json", {"eos_token_id": generation, "temperature": 0.6})
    assert Checkpoint.open(str(folder)).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", True, -1, [1, "2"], 1.5])
def test_end_tokens_of_a_wrong_type_are_named(folder: Path, value: object) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"eos_token_id in .*generation_config\.json"):
        _ = Checkpoint.open(str(folder)).eos_token_ids


def header(value: object, data: bytes = b"") -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + data


BROKEN_FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "short": lambda whole: whole[:5],
    "header cut": lambda whole: whole[:40],
    "data cut": lambda whole: whole[:-1],
    "data added": lambda whole: whole + b"\0",
    "huge header": lambda whole: struct.pack("<Q", 2**63) + whole[8:],
    "no JSON": lambda _: header(b"{]"),
    "no UTF-8": lambda _: header(b'{"\xff": 1}'),
    "no object": lambda _: header([1]),
    "overlap": lambda _: header(
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
        },
        bytes(6),
    ),
    "overflow": lambda _: header(
        {"a": {"dtype": "F32", "shape": [2**32, 2**32, 2**32], "data_offsets": [0, 4]}}, bytes(4)
    ),
    "past the end": lambda _: header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(4)),
    "backwards": lambda _: header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
    "unknown dtype": lambda _: header({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
}


@pytest.mark.parametrize("damage", BROKEN_FILES)
def test_a_damaged_file_is_named(folder: Path, damage: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(BROKEN_FILES[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        Checkpoint.open(str(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not valid JSON"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[1, 2]", "must hold a JSON object, got list"),
        (b'"text"', "must hold a JSON object, got str"),
    ],
    ids=["empty", "cut", "binary", "deep", "list", "string"],
)
def test_damaged_json_is_named(folder: Path, name: str, content: bytes, complaint: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name}.*{complaint}"):
        Checkpoint.open(str(folder))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ({}, f"{INDEX} has no weight_map"),
        ({"weight_map": {}}, f"{INDEX} has no weight_map"),
        ({"weight_map": ["a.weight"]}, f"{INDEX} has no weight_map"),
        ({"weight_map": {"a.weight": 3}}, "maps tensor 'a.weight' to 3"),
        ({"weight_map": {"a.weight": "gone.safetensors"}}, r"gone\.safetensors is missing"),
        (
            {"weight_map": {"c.weight": "model-00001-of-00002.safetensors"}},
            "places tensor 'c.weight' in model-00001-of-00002.safetensors, which does not hold it",
        ),
        ({"weight_map": {"a.weight": "pytorch_model.bin"}}, "names shard 'pytorch_model.bin'; a plain"),
        ({"weight_map": {"a.weight": "../outside.safetensors"}}, "a plain .* file name is needed"),
        ({"weight_map": {"a.weight": "/tmp/outside.safetensors"}}, "a plain .* file name is needed"),
        ({"weight_map": {"a.weight": "..\\outside.safetensors"}}, "a plain .* file name is needed"),
        ({"weight_map": {"a.weight": "a\0.safetensors"}}, "a plain .* file name is needed"),
        ({"weight_map": {"a.weight": ".."}}, "a plain .* file name is needed"),
    ],
)
def test_a_damaged_index_is_named(sharded: Path, index: object, complaint: str) -> None:
    save_file(TENSORS, sharded.parent / "outside.safetensors")
    write_json(sharded / INDEX, index)
    with pytest.raises(CheckpointError, match=complaint):
        Checkpoint.open(str(sharded))


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        Checkpoint.open(str(sharded))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_by_name(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is a pickle"):
        Checkpoint.open(str(folder))


def test_a_folder_without_weights_or_configuration_says_what_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint.open(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        Checkpoint.open(str(folder))


def test_names_that_are_no_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file of a kind that is not read"):
        locate(str(folder / "model.safetensors"))
    for name in ("./nowhere", "/nowhere/at/all", "a/b/c", "no such\nname"):
        with pytest.raises(CheckpointError, match="does not exist: name a folder"):
            locate(name)


def test_a_revision_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="revision 'main' cannot be honoured") as caught:
        Checkpoint.open(str(folder), "main")
    assert caught.value.field == "revision"


def test_a_hub_model_that_is_not_here_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match=r"could not be fetched from the hub: .*; check the name") as caught:
        Checkpoint.open("nobody/no-such-model")
    assert caught.value.field == "model"


def test_a_hub_model_is_found_in_the_local_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The real client on a cache laid out as it lays them out."""
    cache = tmp_path_factory.mktemp("cache")
    snapshot = cache / "models--some--model" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    refs = cache / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123abcd")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert Checkpoint.open("some/model").folder == snapshot
    assert Checkpoint.open("some/model", "main").folder == snapshot
    with pytest.raises(CheckpointError, match="could not be fetched"):
        Checkpoint.open("some/model", "elsewhere")


def test_of_a_hub_model_the_configuration_alone_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot_download(_model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert read_config("some/model") == json.loads((folder / "config.json").read_text())
    Checkpoint.open("some/model")
    assert asked[0] == ["config.json"]
    assert "*.safetensors" in asked[1]


def test_of_a_hub_models_folders_that_of_its_pooling_alone_is_fetched() -> None:
    wanted = ["config.json", "modules.json", "1_Pooling/config.json", "model.safetensors", "tokenizer.json"]
    others = ["onnx/config.json", "original/tokenizer.json", "consolidated.safetensors", "model.bin"]
    found = filter_repo_objects([*wanted, *others], allow_patterns=[*HUB_FILES], ignore_patterns=[*HUB_IGNORED])
    assert [*found] == wanted


def test_a_configuration_is_read_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json")) == {"hidden_size": 3}
    with pytest.raises(CheckpointError, match="no-such"):
        read_config(str(tmp_path / "no-such"))


def test_code_in_a_checkpoint_is_never_run(folder: Path) -> None:
    trap = folder / "trap"
    (folder / "modeling_own.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    own = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    write_json(folder / "config.json", own)
    with pytest.raises(UnsupportedModel, match="OwnForCausalLM"):
        load_decoder(Checkpoint.open(str(folder)), device="cpu", dtype=torch.float32)
    assert not trap.exists()


def test_bundled_names_the_model_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "quire"
    (package / "bundled").mkdir(parents=True)
    monkeypatch.setattr("importlib.resources.files", lambda name: {"quire.models": package}[name])
    with pytest.raises(CheckpointError, match="no bundled model"):
        locate(BUNDLED)
    write_json(package / "bundled" / "config.json", CONFIG)
    assert locate(BUNDLED) == package / "bundled"
    with pytest.raises(CheckpointError, match="revision"):
        locate(BUNDLED, "main")


def test_a_file_of_too_many_tensors_is_refused_before_the_library_parses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object, **__: object) -> None:
        raise AssertionError("the library parses the header")

    monkeypatch.setattr(checkpoint, "safe_open", parse)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps({str(idx): empty for idx in range(MAX_TENSORS + 1)}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="at most 131,072 tensors, got 131,073"):
        checkpoint.read_header(path)
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="its header must have at most 100,000,000 bytes, got 100,000,001"):
        checkpoint.read_header(path)


def test_a_tensor_that_the_header_describes_by_a_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"a": ["F32", [1], [0, 4]]}, bytes(4)))
    with pytest.raises(CheckpointError, match="the header must have an object for tensor 'a'"):
        checkpoint.read_header(path)
