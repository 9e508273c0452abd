"""Folders of adapters: what is read, and damaged, foreign or hostile ones, refused by a message that names why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.bounded.patterns import match_names
from quire.errors import CheckpointError
from quire.models.adapters.peft_folder import ModuleShape, PeftAdapter, module_key, read_peft
from tests.models.adapters.folders import PREFIX, random_matrices, write_adapter

WIDTHS = {f"model.layers.{idx}.self_attn.{name}": (8, 6) for idx in range(2) for name in ("q_proj", "v_proj")}
SHAPES = {module_key(name): ModuleShape(in_width, out_width) for name, (out_width, in_width) in WIDTHS.items()}
FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj"


def write(folder: Path, **config: Any) -> Path:
    return write_adapter(folder, random_matrices(WIDTHS), **config)


def read(folder: Path, max_rank: int = 16) -> PeftAdapter:
    return read_peft(folder, SHAPES, max_rank)


def scales(folder: Path, **config: Any) -> list[float]:
    return [each.scale for _, each in sorted(read(write(folder, **config)).matrices.items())]


def test_scales_follow_alpha_rank_and_patterns(tmp_path: Path) -> None:
    assert scales(tmp_path, lora_alpha=6) == [1.5] * 4
    assert scales(tmp_path, lora_alpha=6, use_rslora=True) == [3.0] * 4
    assert scales(tmp_path, alpha_pattern={"layers.1.self_attn.v_proj": 2, "q_proj": 4}) == [1.0, 2.0, 1.0, 0.5]
    assert scales(tmp_path, alpha_pattern={r"model\.layers\.[1-9]\..*": 4}) == [2.0, 2.0, 1.0, 1.0]
    assert scales(tmp_path, r=9, rank_pattern={"q_proj": 4, ".*v_proj": 4}, lora_alpha=4) == [1.0] * 4
    assert scales(tmp_path, target_modules=["v_proj", "q_proj"]) == [2.0] * 4
    assert scales(tmp_path, target_modules=r".*\.(q|v)_proj") == [2.0] * 4
    assert scales(tmp_path, target_modules="all-linear") == [2.0] * 4


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    plain = read(write(tmp_path / "a")).digest
    assert read(write(tmp_path / "b", inference_mode=True, lora_dropout=0.1)).digest == plain
    assert read(write(tmp_path / "c", lora_alpha=9)).digest != plain
    assert read(write_adapter(tmp_path / "d", random_matrices(WIDTHS, seed=1))).digest != plain


def test_names_of_other_wrappers_are_the_language_model_s(tmp_path: Path) -> None:
    tensors = {
        name.replace("model.layers", "model.language_model.layers"): each
        for name, each in random_matrices(WIDTHS).items()
    }
    assert read(write_adapter(tmp_path, tensors)).matrices.keys() == SHAPES.keys()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "'peft_type' must be LORA"),
        ({"use_dora": True}, "'use_dora' is not supported"),
        ({"lora_bias": True}, "'lora_bias' is not supported"),
        ({"bias": "all"}, "'bias' must be"),
        ({"bias": "lora_only"}, "'bias' must be"),
        ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights' must be"),
        ({"init_lora_weights": "olora"}, "'init_lora_weights' must be"),
        ({"init_lora_weights": "corda"}, "'init_lora_weights' must be"),
        ({"init_lora_weights": "loftq"}, "'init_lora_weights' must be"),
        ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens' is not supported"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is not supported"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "'target_parameters' is not supported"),
        ({"trainable_token_indices": [3]}, "'trainable_token_indices' is not supported"),
        ({"new_field": 7}, "'new_field' is not supported, got 7: the field is not known"),
        ({"r": 0}, "'r' must be a positive integer, got 0"),
        ({"r": "4"}, "'r' must be a positive integer"),
        ({"r": 5}, "must be of shape \\[5, 6\\], got \\[4, 6\\]"),
        ({"lora_alpha": None}, "'lora_alpha' must be a number"),
        ({"lora_alpha": float("nan")}, "'lora_alpha' must be a number"),
        ({"use_rslora": "yes"}, "'use_rslora' must be true or false"),
        ({"rank_pattern": {"q_proj": 0}}, "'rank_pattern.q_proj' must be a positive integer"),
        ({"rank_pattern": [3]}, "'rank_pattern' must be an object"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern"),
        ({"target_modules": 5}, "'target_modules' must be a list"),
        ({"target_modules": ["k_proj"]}, "which target_modules does not name"),
        ({"target_modules": r".*\.q_proj"}, "which target_modules does not name"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, **config))


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Return a function that changes the tensors of a folder."""

    def run(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return run


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def pipe(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


def grow(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "not a whole safetensors file"),
        (pipe, "cannot be read"),
        (grow, "cannot be read: it is longer than"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 99), "not a whole safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b""), "not a whole safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda folder: (folder / "adapter_config.json").write_text("[" * 9999), "is not valid JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "must hold a JSON object"),
        (changed(dict.clear), "has no adapter for any module"),
        (changed(lambda each: each.pop(f"{FIRST}.lora_B.weight")), "has only lora_A"),
        (changed(lambda each: each.update({f"{FIRST}.lora_A.weight": torch.zeros(4, 7)})), "must be of shape"),
        (changed(lambda each: each.update({f"{FIRST}.lora_B.weight": torch.zeros(8, 4, 1)})), "must be of shape"),
        (changed(lambda each: each[f"{FIRST}.lora_A.weight"].view(-1)[3:4].fill_(torch.nan)), "no finite numbers"),
        (changed(lambda each: each[f"{FIRST}.lora_B.weight"].fill_(torch.inf)), "no finite numbers"),
        (changed(lambda each: each.update({f"{FIRST}.lora_A.weight": torch.zeros(4, 6).char()})), "torch.int8"),
        (changed(lambda each: each.update({"lm_head.weight": torch.zeros(2, 2)})), "is not lora_A.weight"),
        (changed(lambda each: each.update({f"{FIRST}.lora_magnitude_vector": torch.zeros(8)})), "is not lora_A.weight"),
        (changed(lambda each: each.update({f"{FIRST}.lora_B.bias": torch.zeros(8)})), "is not lora_A.weight"),
        (
            changed(lambda each: each.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 6)})),
            "'lm_head', which is no linear layer",
        ),
        (
            changed(lambda each: each.update({f"{FIRST[:-6]}9_proj.lora_A.weight": torch.zeros(4, 6)})),
            "which is no linear layer",
        ),
        (
            changed(lambda each: each.update({k.replace("model.model", "model"): v + 1 for k, v in [*each.items()]})),
            "two adapters for the module",
        ),
    ],
)
def test_files_that_are_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = write(tmp_path, target_modules="all-linear")
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


def test_ranks_end_at_the_limit(tmp_path: Path) -> None:
    assert read(write(tmp_path), 4).matrices
    with pytest.raises(CheckpointError, match=r"rank 4 in .*above max_lora_rank, which is 3"):
        read(tmp_path, 3)


def test_a_pattern_that_takes_exponential_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = partial(match_names, timeout_s=0.5)
    monkeypatch.setattr("quire.models.adapters.peft_config.match_names", limited)
    folder = write(tmp_path, alpha_pattern={"(.|.)*!": 3})
    with pytest.raises(CheckpointError, match="alpha_pattern"):
        read(folder)
    assert json.loads((folder / "adapter_config.json").read_text())["alpha_pattern"]
