"""Malicious and damaged checkpoints, each a function of a seed."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.published import CONFIGS
from tests.text.test_chat import BOMBS

# What may stand in any field.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 10**9, 2**31, 2**31 - 1, 2**63, 10**30, 10**400, -(10**30), 0.0,
    1e-300, 1e300, 1.5, -1.5, float("nan"), float("inf"), -float("inf"), "", "a", "silu", "x" * 10**5, "\x00", [], [0],
    [1] * 1000, [[]], ["a", None], {}, {"a": 1}, {"rope_type": "yarn", "factor": 1e300}, [10**30] * 3,
    {"factor": 10**400},
)  # fmt: skip
MORE_FIELDS = (
    "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "text_config",
    "quantization_config", "num_experts", "num_local_experts", "partial_rotary_factor", "architectures", "model_type",
    "dtype", "torch_dtype", "eos_token_id", "attention_bias", "mlp_bias", "hidden_act", "rms_norm_eps",
    "max_position_embeddings",
)  # fmt: skip
ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "proportional", "longrope")
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
# Settings of tokenizers that take time or memory, or make the library panic.
NORMALIZERS: tuple[Any, ...] = (
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 3},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 10**6},
    {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": "(?:a*)*b"}, "content": "b"},
    {"type": "Prepend", "prepend": "x" * 10**6},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
    {"type": "NFKD"},
    {"type": "Nothing"},
)
WORDS: tuple[Any, ...] = (
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(?:a|a)*b"}, "behavior": "Removed", "invert": True},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(?R)"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(" * 5000 + ")" * 5000}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
    {"type": "Metaspace", "replacement": "▁▁", "prepend_scheme": "always", "split": True},
    {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}] * 30},
    {"type": "FixedLength", "length": 0},
    None,
)
DECODERS: tuple[Any, ...] = (
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10**6},
    {"type": "Replace", "pattern": {"String": ""}, "content": "b"},
    {"type": "Strip", "content": " ", "start": 10**9, "stop": 0},
    {"type": "Strip", "content": " ", "start": 1, "stop": 1},
    {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
    {"type": "WordPiece", "prefix": "#" * 10**5, "cleanup": True},
    {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "a", "start": 9, "stop": 0}]},
    {"type": "ByteFallback"},
    None,
)  # fmt: skip
PROCESSORS: tuple[Any, ...] = (
    {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 5000,
        "pair": [],
        "special_tokens": {},
    },
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 900,
        "pair": [],
        "special_tokens": {"a": {"id": "a", "ids": [5] * 10**5, "tokens": ["a"] * 10**5}},
    },
    {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
)  # fmt: skip
MODELS: tuple[dict[str, Any], ...] = (
    {"dropout": 0.5}, {"dropout": 7.0}, {"unk_token": "nowhere"}, {"continuing_subword_prefix": "x" * 10**5},
    {"end_of_word_suffix": "y" * 10**5}, {"byte_fallback": True}, {"fuse_unk": True}, {"ignore_merges": True},
    {"vocab": {}}, {"vocab": {"a": 0}}, {"vocab": {"a": 2**32 - 1}}, {"vocab": {"a": 2**31}}, {"vocab": {"a": -1}},
    {"merges": [["a", "b"]]}, {"merges": ["a"]}, {"merges": [["a", "nowhere"]] * 3}, {"type": "WordLevel"},
    {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**12},
    {"type": "Unigram", "vocab": [["a", -1.0], ["b", float("1e300")]], "unk_id": 7},
    {"type": "Unigram", "vocab": [], "unk_id": None},
)  # fmt: skip


class Maker:
    """Makes hostile checkpoints out of a good one.

    Args:
        good: the folder of the good one.
    """

    def __init__(self, good: Path) -> None:
        self._good = good
        kinds = (_config, _configs, _family, _file, _tokenizer, _anywhere_in_json, _template, _header, _weights)
        self.kinds: dict[str, Callable[[Path, random.Random], None]] = {each.__name__[1:]: each for each in kinds}

    def make(self, folder: Path, kind: str, seed: int) -> Path:
        """Write the checkpoint of a kind and a seed, and return its folder."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._good, folder)
        self.kinds[kind](folder, random.Random(f"{kind} {seed}"))
        return folder


def _edit(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_bytes()) if path.exists() else {}
    changed = change(value)
    path.write_text(json.dumps(value if changed is None else changed), encoding="utf-8")


def _config(folder: Path, rng: random.Random) -> None:
    """One field of the configuration has another value."""

    def change(config: dict[str, Any]) -> None:
        config[rng.choice([*config, *MORE_FIELDS])] = rng.choice(VALUES)

    _edit(folder / "config.json", change)


def _configs(folder: Path, rng: random.Random) -> None:
    """Several fields have, some of them in parts of the configuration; or it is of another family."""
    from quire.models.families import FAMILIES

    def change(config: dict[str, Any]) -> None:
        for _ in range(rng.randint(1, 6)):
            config[rng.choice([*config, *MORE_FIELDS])] = rng.choice(VALUES)
        if rng.random() < 0.5:
            config["architectures"] = [rng.choice([*FAMILIES])]
        if rng.random() < 0.3:
            config["text_config"] = dict(config)
        if rng.random() < 0.4:
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta")
            scaling = {name: rng.choice([*VALUES, 2.0, 8.0, 1024]) for name in names}
            config["rope_scaling"] = scaling | {"rope_type": rng.choice(ROPES)}

    _edit(folder / "config.json", change)


def _family(folder: Path, rng: random.Random) -> None:
    """The configuration is that of a well-known model, but for some fields, also in parts of it."""
    config = json.loads(json.dumps(rng.choice([*CONFIGS.values()])))
    for _ in range(rng.randint(0, 3)):
        inner = config.get("text_config")
        part = inner if isinstance(inner, dict) and rng.random() < 0.7 else config
        part[rng.choice([*part, *MORE_FIELDS])] = rng.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _file(folder: Path, rng: random.Random) -> None:
    """A file is something else than a file, or holds something else."""
    path = folder / rng.choice([*FILES, "chat_template.jinja", "model.safetensors.index.json"])
    raw = path.read_bytes() if path.exists() else b"{}"
    if path.name.endswith("index.json"):
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        raw = json.dumps(
            {"weight_map": dict.fromkeys(load_file(folder / "part.safetensors"), "part.safetensors")}
        ).encode()
    path.unlink(missing_ok=True)
    kind = rng.randrange(16)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/random", "/dev/full", "/proc/self/mem", path.name, "/"]))
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        with path.open("wb") as file:
            file.truncate(rng.choice([10**9, 10**12]))
    else:
        contents: list[bytes] = [
            b"",
            raw[: rng.randrange(len(raw) + 1)],
            raw * 2,
            rng.randbytes(1000),
            b"[" * 10**5,
            b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
            b"[]",
            b"null",
            b"1" * 10**5,
            b'{"a": "\\ud800"}',
            b"\xef\xbb\xbf" + raw,
            raw.decode("latin-1").encode("utf-16"),
            b"\xff\xfe" + raw,
            bytes(each ^ (1 << rng.randrange(8)) if rng.random() < 0.01 else each for each in raw),
        ]
        path.write_bytes(rng.choice(contents))


def _tokenizer(folder: Path, rng: random.Random) -> None:
    """The tokenizer has settings that take time or memory, or make the library panic."""

    def change(tokenizer: dict[str, Any]) -> None:
        kind = rng.randrange(6)
        if kind == 0:
            tokenizer["normalizer"] = rng.choice(NORMALIZERS)
        elif kind == 1:
            tokenizer["pre_tokenizer"] = rng.choice(WORDS)
        elif kind == 2:
            tokenizer["decoder"] = rng.choice(DECODERS)
        elif kind == 3:
            tokenizer["post_processor"] = rng.choice(PROCESSORS)
        elif kind == 4:
            tokenizer["model"] |= rng.choice(MODELS)
        else:
            content = rng.choice(["", "a", "\x00", " ", "x" * 10**5, "▁", "Ġ", "Hello"])
            flags = {name: rng.random() < 0.5 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            place = rng.choice([0, 5, 10**6, 2**31, 2**32 - 1, -1])
            tokenizer["added_tokens"].append({"id": place, "content": content, **flags})

    _edit(folder / "tokenizer.json", change)


def _anywhere_in_json(folder: Path, rng: random.Random) -> None:
    """Something somewhere in one of the files has another value, is missing, or is there twice."""

    def change(value: Any) -> Any:
        for _ in range(rng.randint(1, 3)):
            parent = value
            while True:
                keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
                if not keys:
                    break
                key = rng.choice(keys)
                if isinstance(parent[key], dict | list) and rng.random() < 0.8:
                    parent = parent[key]
                    continue
                if rng.random() < 0.2:
                    del parent[key]
                else:
                    parent[key] = rng.choice(VALUES)
                break
        return value

    _edit(folder / rng.choice([name for name in FILES if name.endswith(".json")]), change)


def _template(folder: Path, rng: random.Random) -> None:
    """The chat template is a bomb, or no template; special tokens are what they cannot be."""
    bombs: list[Any] = [
        *BOMBS.values(), None, 3, "", "{% for %}", "x" * (2 << 20), ["a"], [{"name": [], "template": "a"}],
        [{"name": "default", "template": 3}], [{"name": "default", "template": "a"}, {"name": {}, "template": "b"}],
        {"default": "a"}, "{{ messages[9].content }}", "{{ bos_token }}" * 10, "{{ 1 / 0 }}",
    ]  # fmt: skip

    def change(config: dict[str, Any]) -> None:
        config["chat_template"] = rng.choice(bombs)
        tokens: list[Any] = [None, "", "\ud800", "<|bos|>", "x" * 10**5, [], {"content": "\udfff"}, {"content": []}, 3]
        for name in ("bos_token", "eos_token", "pad_token"):
            if rng.random() < 0.5:
                config[name] = rng.choice(tokens)

    _edit(folder / "tokenizer_config.json", change)


def _header(folder: Path, rng: random.Random) -> None:
    """The header of the weights says something else."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    name = rng.choice([key for key in header if key != "__metadata__"])
    kind = rng.randrange(7)
    if kind == 0:
        header[name]["shape"] = rng.choice([[], [0], [10**9, 10**9], [2**63], [-1], [1.5], "a", [64] * 100])
    elif kind == 1:
        header[name]["dtype"] = rng.choice(["F64", "I64", "BOOL", "F8_E4M3", "U8", "", 3, None])
    elif kind == 2:
        header[name]["data_offsets"] = rng.choice([[0, 0], [0, 10**30], [5, 1], [-1, 4], [0], "a", [2**63, 2**63 + 4]])
    elif kind == 3:
        del header[name]
    elif kind == 4:
        header["x" * 10**5] = header.pop(name)
    elif kind == 5:
        header["__metadata__"] = rng.choice([{"a": 1}, [], 3, {"a": "b" * 10**6}])
    text = json.dumps(header).encode()
    length = rng.choice([len(text)] * 6 + [0, 1, 2**63, 10**8, len(text) + 10**6]) if kind == 6 else len(text)
    path.write_bytes(struct.pack("<Q", length) + text + data)


def _weights(folder: Path, rng: random.Random) -> None:
    """The weights are no numbers, or of other shapes."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in rng.sample(sorted(tensors), rng.randint(1, len(tensors))):
        tensor = tensors[name]
        tensors[name] = rng.choice(
            [
                torch.full_like(tensor, float("nan")),
                torch.full_like(tensor, float("inf")),
                torch.full_like(tensor, 3e38),
                torch.zeros_like(tensor),
                tensor.to(torch.float16),
                tensor.to(torch.float64),
                tensor[:1].clone(),
                tensor[None].clone(),
                torch.empty(0),
                torch.randn_like(tensor) * 1e20,
            ]
        )
    save_file(tensors, str(path))
