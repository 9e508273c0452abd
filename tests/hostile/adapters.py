"""Malicious and damaged adapters, each a function of a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.hostile.checkpoints import VALUES

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FIELDS = (
    *("peft_type", "peft_version", "r", "lora_alpha", "target_modules", "target_parameters", "bias", "use_rslora"),
    *("rank_pattern", "alpha_pattern", "init_lora_weights", "use_dora", "modules_to_save", "layers_pattern", "unknown"),
)
SHAPES = ((), (0,), (1,), (0, 0), (1, 0), (0, 6), (4, 6), (8, 4), (6, 4), (9, 6), (4, 6, 1), (1, 1, 1, 1, 1), (40, 6))
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64)
NAMES = (
    *(
        "",
        "\0",
        "lora_A.weight",
        ".lora_A.weight",
        "base_model.model..lora_B.weight",
        "x" * 5000,
        "\u202e.lora_A.weight",
    ),
    *("model.layers.99.self_attn.q_proj.lora_A.weight", "model.layers.0.mlp.experts.999999.up_proj.lora_B.weight"),
    *("model.layers.0.mlp.experts.lora_A.weight", "model.layers.0.mlp.experts" + ".base_layer" * 50 + ".lora_A.weight"),
)
REPLACED = ((b"F32", b"F64"), (b"F32", b"X32"), (b"[0,", b"[9,"), (b'"shape"', b'"Shape"'))


class AdapterMaker:
    """Damages copies of a good adapter's folder."""

    def __init__(self, good: Path) -> None:
        self._config = json.loads((good / CONFIG).read_text())
        self._tensors = load_file(good / TENSORS)
        self._raw = (good / TENSORS).read_bytes()

    @property
    def kinds(self) -> dict[str, Callable[[random.Random, Path], None]]:
        """The kinds of damage by name."""
        return {"config": self._damage_config, "tensors": self._damage_tensors, "bytes": self._damage_bytes}

    def make(self, kind: str, seed: int, folder: Path) -> Path:
        """Write the adapter of a seed."""
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(self._config))
        (folder / TENSORS).write_bytes(self._raw)
        self.kinds[kind](random.Random(f"{kind} {seed}"), folder)
        return folder

    def _damage_config(self, rng: random.Random, folder: Path) -> None:
        config: dict[str, Any] = dict(self._config)
        for _ in range(rng.randint(1, 3)):
            field, value = rng.choice(FIELDS), rng.choice(VALUES)
            if field.endswith("_pattern") and rng.random() < 0.7:
                value = {rng.choice(("q_proj", "(", "(a+)+$", ".*", "layers.0", "")): value}
            elif field.startswith("target") and rng.random() < 0.7:
                value = rng.choice(("(", ".*", "all-linear", ["q_proj", value], ["("], "(a|a)*" * 9))
            config[field] = value
            if rng.random() < 0.2:
                config.pop(rng.choice([*config]))
        (folder / CONFIG).write_text(json.dumps(config))

    def _damage_tensors(self, rng: random.Random, folder: Path) -> None:
        tensors = dict(self._tensors)
        for _ in range(rng.randint(1, 3)):
            name = rng.choice([*tensors])
            match rng.randrange(5):
                case 0:
                    tensors[name] = torch.zeros(rng.choice(SHAPES))
                case 1:
                    tensors[name] = torch.zeros(rng.choice(SHAPES), dtype=rng.choice(DTYPES))
                case 2:
                    tensors[rng.choice(NAMES)] = tensors.pop(name)
                case 3:
                    tensors[name] = torch.full(tensors[name].shape, rng.choice((1e38, float("nan"), float("inf"))))
                case _:
                    del tensors[name]
            if not tensors:
                break
        save_file(tensors, folder / TENSORS)

    def _damage_bytes(self, rng: random.Random, folder: Path) -> None:
        raw, end = bytearray(self._raw), 8 + int.from_bytes(self._raw[:8], "little")
        for _ in range(rng.randint(1, 4)):
            match rng.randrange(6):
                case 0:  # in the header's length
                    raw[rng.randrange(8)] = rng.randrange(256)
                case 1:
                    raw[rng.randrange(8, end)] = rng.choice(b'{}[],:"0123456789-eE\\\x00\xff')
                case 2:  # other types and offsets
                    old, new = rng.choice(
                        ((b"F32", b"F64"), (b"F32", b"X32"), (b"[0,", b"[9,"), (b'"shape"', b'"Shape"'))
                    )
                    raw = bytearray(bytes(raw).replace(old, new, rng.randint(1, 2)))
                case 3:
                    del raw[rng.randrange(len(raw) - 1) :]
                    break
                case 4:
                    raw += bytes(rng.randint(1, 99))
                case _:  # in a value
                    raw[rng.randrange(end, len(raw))] = rng.randrange(256)
                    break
        (folder / TENSORS).write_bytes(bytes(raw))
