"""A checkpoint: a folder with configuration and safetensors files, or a GGUF file.

Nothing in it is executed: weights are never read from pickles, and code in a checkpoint is never imported.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quire.errors import CheckpointError, shown
from quire.models.checkpoints.safetensors_header import check_num_tensors, read_header_text
from quire.models.checkpoints.sentence_modules import dense_configs
from quire.models.families.base_models import with_head
from quire.models.families.dense_layers import DENSE
from quire.models.families.expert_layout import (
    BLOCK_EXPERTS,
    LINEAR_EXPERTS,
    ROW_EXPERTS,
    has_block_experts,
    has_linear_experts,
    has_row_experts,
)
from quire.models.tensors.stored_tensor import StoredTensor
from quire.platform.bounded.files import open_file, read_json, reason_of, user_path

BUNDLED = "bundled"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
HUB_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.jinja", "merges.txt", "vocab.txt")
# Copies of the same weights in another layout, and files for other engines in subfolders; not "1_Pooling", "2_Dense".
HUB_IGNORED = ("consolidated*", "[!1-9]*/*")
# Larger than the configuration and the index of any model.
MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TOKEN_ID = 2**31 - 1
GGUF_SUFFIX = ".gguf"
# Short messages for errors of the hub's client, whose own messages are long.
HUB_ERRORS = {
    "LocalEntryNotFoundError": "the hub cannot be reached, and the local cache has no copy",
    "RepositoryNotFoundError": "the hub has no such model, or it needs HF_TOKEN",
    "GatedRepoError": "the model's owner must grant access, and HF_TOKEN must be set",
    "RevisionNotFoundError": "the model has no such revision",
}
_OWNER_ADVICE = "names on the hub have an owner (OWNER/NAME), and folders may begin with ./"
_QUANTIZATION = re.compile(r"[A-Za-z0-9_.-]{2,32}")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files, read as far as their headers.

    Args:
        folder: folder of the files, with the tokenizer if there is one.
        config: `config.json`.
        generation_config: `generation_config.json`; empty if there is none.
        tensors: every stored tensor by name.
        gguf_fields: metadata of the GGUF file that the model is read from; None for a folder.
        divided: names of the parts of tensors that a GGUF file divides; see `GGUFModel`.
        gguf_path: the GGUF file, or the first part of a split file; None for a folder.
        image_settings: fields of the image processor from a GGUF file; None if they are in a file of the folder.
    """

    folder: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    gguf_fields: Mapping[str, Any] | None = None
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_path: Path | None = None
    image_settings: Mapping[str, Any] | None = None

    @classmethod
    def open(cls, model: str, revision: str | None = None) -> Checkpoint:
        """Find a model and read its configuration and the headers of its weights.

        Args:
            model: a local folder, a GGUF file (the first part of a split one), "bundled", or a Hugging Face hub id,
                with ":" and a quantisation ("Q4_K_M") for a GGUF file.
            revision: a branch, tag or commit of a hub id.

        Raises:
            CheckpointError: the model is not found, or a file is missing, damaged or refused; the message names it.
        """
        file = find_gguf(model, revision)
        if file is not None:  # planning of other models needs no torch
            from quire.models.gguf.opening import open_gguf

            opened = open_gguf(file)
            return cls(file.parent, opened.config, {}, opened.tensors, opened.fields, opened.divided, file)
        folder = locate(model, revision)
        config, tensors = read_object(folder / "config.json"), _read_headers(folder)
        if has_linear_experts(tensors):
            config |= {LINEAR_EXPERTS: True}
        if has_block_experts(tensors):
            config |= {BLOCK_EXPERTS: True}
        dense = dense_configs(folder)
        if dense:
            config |= {DENSE: dense}
        if has_row_experts({name: stored.shape for name, stored in tensors.items()}):
            config |= {ROW_EXPERTS: True}
        generation = folder / "generation_config.json"
        causal_config, causal_tensors = with_head(config, tensors)
        return cls(
            folder=folder,
            config=causal_config,
            generation_config=read_object(generation) if generation.is_file() else {},
            tensors={**causal_tensors, **_dense_tensors(folder, dense)},
        )

    def sources_of(self, names: Sequence[str]) -> list[str]:
        """Return the names of the stored tensors that make up tensors of the family."""
        return [part for name in names for part in self.divided.get(name, (name,))]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation, from the generation config or else the model's config."""
        for origin, source in (("generation_config.json", self.generation_config), ("config.json", self.config)):
            value = source.get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in ids):
                raise CheckpointError(
                    f"eos_token_id in {self.folder / origin} must be a token id or a list of them, got {shown(value)}"
                )
            return tuple(ids)
        return ()


def read_config(model: str, revision: str | None = None) -> Mapping[str, Any]:
    """Read a model's `config.json` only; for a hub id, only this file is fetched.

    Args:
        model: a local folder, a `config.json`, "bundled", or a Hugging Face hub id.
        revision: a branch, tag or commit of a hub id.

    Raises:
        CheckpointError: the model is not found, or a file is missing or damaged; the message names it.
    """
    file = find_gguf(model, revision)
    if file is not None:
        from quire.models.gguf.opening import open_gguf

        return open_gguf(file).config
    path = user_path(model)
    if model == BUNDLED or not os.path.isfile(path):
        return read_object(locate(model, revision, only="config.json") / "config.json")
    if revision is not None:
        raise CheckpointError(
            f"revision {revision!r} cannot be honoured: model {shown(model)} is a local file, which has none",
            field="revision",
        )
    return read_object(path)


def check_weights(folder: Path) -> None:
    """Check that a folder has files of weights.

    Raises:
        CheckpointError: it has none.
    """
    if not os.path.isfile(folder / SINGLE_FILE) and not os.path.isfile(folder / INDEX_FILE):
        raise CheckpointError(_missing_weights(folder))


def locate(model: str, revision: str | None = None, only: str | None = None) -> Path:
    """Return the folder with a model's files; for a hub id, they are fetched.

    Args:
        model: a local folder, "bundled", or a Hugging Face hub id.
        revision: a branch, tag or commit; for hub ids only.
        only: the only file to fetch for a hub id; None for all files of the model.

    Raises:
        CheckpointError: there is no such folder or model, or a revision is given for something that has none.
    """
    if model == BUNDLED:
        folder = Path(str(resources.files("quire.models").joinpath("bundled")))
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                "this installation has no bundled model; name a local folder or a hub id", field="model"
            )
    else:
        folder = user_path(model)
        if not os.path.exists(folder) and _HUB_ID.fullmatch(model):
            return _download(model, revision, HUB_FILES if only is None else (only,))
        if not os.path.isdir(folder):
            reason = "does not exist: name a folder, a .gguf file, or a model on the hub as OWNER/NAME"
            if os.path.exists(folder):
                reason = "is a file of a kind that is not read: name the folder with config.json, or a .gguf file"
            raise CheckpointError(f"model {shown(model)} {reason}", field="model")
    if revision is not None:
        raise CheckpointError(
            f"revision {revision!r} cannot be honoured: model {shown(model)} is a local folder, which has none",
            field="revision",
        )
    return folder


def find_gguf(model: str, revision: str | None = None) -> Path | None:
    """Return the GGUF file of a model, or None for another kind of model; for a hub id, it is fetched.

    Args:
        model: a file, a folder that has a GGUF file and no config.json, or a hub id with ":" and a quantisation.
        revision: a branch, tag or commit; for hub ids only.

    Raises:
        CheckpointError: a folder has several models, no file has the quantisation, or a revision is given for
            something that has none.
    """
    path = user_path(model)
    hub_id, colon, quantization = model.partition(":")
    if not os.path.exists(path) and colon and _HUB_ID.fullmatch(hub_id) and _QUANTIZATION.fullmatch(quantization):
        folder = _download(hub_id, revision, (f"*{quantization}*{GGUF_SUFFIX}", f"*{quantization}*/*{GGUF_SUFFIX}"), ())
        wanted = re.compile(rf"(?:^|[^A-Za-z0-9]){re.escape(quantization)}(?:[^A-Za-z0-9_]|$)", re.IGNORECASE)
        files = [file for file in folder.rglob(f"*{GGUF_SUFFIX}") if wanted.search(file.name)]
        return _the_model_of(files, f"{hub_id} at quantisation {quantization}")
    if os.path.isdir(path) and not (path / "config.json").is_file() and any(path.glob(f"*{GGUF_SUFFIX}")):
        path = _the_model_of([*path.glob(f"*{GGUF_SUFFIX}")], str(path))
    elif path.suffix != GGUF_SUFFIX or not os.path.isfile(path):
        return None
    if revision is not None:
        raise CheckpointError(
            f"revision {revision!r} cannot be honoured: model {shown(model)} is a local file, which has none",
            field="revision",
        )
    return path


def is_mmproj(file: Path) -> bool:
    """Return whether a GGUF file holds a vision encoder by its name: all publishers have the same word in it."""
    return "mmproj" in file.name.lower()


def _the_model_of(files: Sequence[Path], where: str) -> Path:
    """Return the only model among GGUF files; its later parts and vision encoders do not count."""
    models = sorted(file for file in files if not _LATER_PART.search(file.name) and not is_mmproj(file))
    if len(models) != 1:
        names = ", ".join(file.name for file in models[:8]) or "none"
        raise CheckpointError(f"one GGUF model is needed in {where}, found {names}: name the file", field="model")
    return models[0]


def _download(model: str, revision: str | None, patterns: Sequence[str], ignored: Sequence[str] = HUB_IGNORED) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"model {shown(model)} is no local folder, and hub ids need the huggingface_hub package: install it, or "
            "name a folder",
            field="model",
        ) from error
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(ignored)
        )
    # The hub client passes on errors of its HTTP and cache layers; after any of them, the model is not available.
    except Exception as error:
        name = type(error).__name__
        why = HUB_ERRORS.get(name) or f"{name}: {' '.join(str(error).split())[:100]}"
        advice = "check the name, the revision and the network" if "/" in model else _OWNER_ADVICE
        if get_close_matches(model, [BUNDLED]):
            advice = f"did you mean {BUNDLED!r}?"
        raise CheckpointError(
            f"model {shown(model)} is no folder here, and could not be fetched from the hub: {why}; {advice}",
            field="model",
        ) from error
    return Path(folder)


def read_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    try:
        value = read_json(path, max_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {reason_of(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _dense_tensors(folder: Path, paths: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the tensors of dense layers in folders of their own, which are the prefixes of their names."""
    return {
        f"{path}.{name}": stored for path in paths for name, stored in read_header(folder / path / SINGLE_FILE).items()
    }


def _read_headers(folder: Path) -> dict[str, StoredTensor]:
    check_weights(folder)
    if os.path.isfile(folder / SINGLE_FILE):
        return read_header(folder / SINGLE_FILE)
    index = folder / INDEX_FILE
    weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    shards = {shard: read_header(_shard_path(index, shard)) for shard in _shard_names(index, weight_map)}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(f"{index} places tensor {shown(name)} in {shard}, which does not hold it")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _shard_names(index: Path, weight_map: Mapping[str, object]) -> list[str]:
    names: set[str] = set()
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index} maps tensor {shown(tensor)} to {shown(shard)}, which is no file name")
        names.add(shard)
    return sorted(names)


def _shard_path(index: Path, shard: str) -> Path:
    # Only the name is checked, since the files in a hub cache are links to files outside of the folder.
    if "/" in shard or "\\" in shard or "\0" in shard or not shard.endswith(".safetensors"):
        raise CheckpointError(f"{index} names shard {shown(shard)}; a plain *.safetensors file name is needed")
    path = index.parent / shard
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, but {index.name} lists it")
    return path


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file; the library checks every offset against the file's length.

    Raises:
        CheckpointError: the file is damaged, or cut off.
    """
    tensors = {}
    try:
        with open_file(path) as raw:
            header = read_header_text(raw)
            start = raw.tell()  # the offsets of tensors count from here
        check_num_tensors(header)
        with safe_open(path, framework="pt") as file:
            places = json.loads(header)
            for name in file.keys():  # noqa: SIM118 - the handle is not a mapping
                if not isinstance(places[name], dict):  # the library takes a list of the same values, too
                    raise ValueError(f"the header must have an object for tensor {shown(name)}")
                part, (offset, end) = file.get_slice(name), places[name]["data_offsets"]
                shape = tuple(part.get_shape())
                tensors[name] = StoredTensor(path, part.get_dtype(), shape, start + offset, end - offset)
    except (MemoryError, RuntimeError) as error:
        # A file that is larger than the memory, or claims to be, cannot be mapped.
        raise CheckpointError(f"{path} cannot be mapped; the memory is smaller than the file ({error})") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    return tensors


def _missing_weights(folder: Path) -> str:
    wanted = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return f"{wanted}; {pickles[0]} is a pickle, which can run code when it is read: convert it to safetensors"
    return wanted
