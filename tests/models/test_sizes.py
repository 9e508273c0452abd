"""Sizes stated in a configuration are compared with the stored tensors before anything is allocated."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError, ConfigError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.finite_values import check_finite
from quire.models.loading.loading import load_decoder
from quire.models.loading.sizes import check_sizes
from quire.models.modules.causal_model import CausalModel
from quire.models.tensors.stored_tensor import StoredTensor
from tests.models.stored_tensors import stored_tensors
from tests.models.tiny import CASES, make_tiny
from tests.server import checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path / "model")


def load(folder: Path) -> CausalModel:
    return load_decoder(Checkpoint.open(str(folder)), device="cpu", dtype=torch.float32)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 10**9, "head_dim": 16}, "hidden_size is 1,000,000,000, but the largest that is stored has"),
        ({"head_dim": 10**9}, "num_attention_heads times head_dim is 4,000,000,000"),
        ({"num_attention_heads": 10**6}, "num_attention_heads times head_dim"),
        ({"num_attention_heads": 10**6, "num_key_value_heads": 10**6}, "times head_dim"),
        ({"intermediate_size": 10**9}, "intermediate_size is 1,000,000,000"),
        ({"vocab_size": 10**9}, "vocab_size is 1,000,000,000"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers is 1000, but only 21 tensors are stored"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 1024, got 1000000000"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings must be an integer from 1 to 2147483647"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, "and 2147483647 is the most"),
        ({"hidden_size": [[[[]]]] * 10**5}, "hidden_size must be an integer"),
        ({"architectures": [[]]}, "architecture"),
        ({"eos_token_id": 10**30}, "eos_token_id"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_name(folder: Path, fields: dict[str, Any], says: str) -> None:
    change(folder, **fields)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        _ = load(folder), Checkpoint.open(str(folder)).eos_token_ids
    assert len(str(caught.value)) < 1000  # whatever was given


@pytest.mark.parametrize("name", CASES)
def test_no_model_is_larger_than_what_is_stored_of_it(name: str) -> None:
    tiny = make_tiny(name)
    tensors = stored_tensors(tiny.reference).items()
    check_sizes(
        tiny.decoder.spec, {name: StoredTensor(Path(), "F32", tuple(each.shape), 0, 0) for name, each in tensors}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(folder: Path, dtype: torch.dtype, value: float) -> None:
    path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = {each: tensor.to(dtype) for each, tensor in load_file(path).items()}
    save_file(tensors, str(path))
    load(folder)
    tensors[name][3, 5:7] = value
    save_file(tensors, str(path))
    with pytest.raises(CheckpointError, match=re.escape(f"{name!r} with 2 of 6,144 values")):
        load(folder)
    tensors[name] = tensors[name].repeat(1, 50)
    tensors[name][:] = value
    with pytest.raises(CheckpointError, match=r"307,200 of 307,200 values"):
        check_finite(Checkpoint.open(str(folder)), name, tensors[name])


@pytest.mark.parametrize("shape", [(4096, 2048), (8192, 64), (4096, 4096), (1 << 20,)])
def test_a_sample_looks_at_all_columns(folder: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, float("nan"))
    tensor[..., 0] = 0.0
    name = "model.norm.weight"
    with pytest.raises(CheckpointError, match="infinite or no numbers"):
        check_finite(Checkpoint.open(str(folder)), name, tensor)


def test_an_embedding_may_have_rows_that_are_no_numbers_but_not_most(folder: Path) -> None:
    path, name = folder / "model.safetensors", "model.embed_tokens.weight"
    tensors = load_file(path)
    tensors[name][::3] = float("nan")
    save_file(tensors, str(path))
    load(folder)
    tensors[name][:] = float("nan")
    save_file(tensors, str(path))
    with pytest.raises(CheckpointError, match=re.escape(f"{name!r} with ")):
        load(folder)


def test_large_weights_are_numbers(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {name: torch.full_like(tensor, 60_000.0).to(torch.float16) for name, tensor in load_file(path).items()}
    save_file(tensors, str(path))
    load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_what_is_no_file_is_refused_or_not_there(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "generation_config.json":
        assert Checkpoint.open(str(folder)).generation_config == {}
        return
    with pytest.raises(CheckpointError, match=name):
        Checkpoint.open(str(folder))
