"""Weights: the right numbers in the right places, or the name of what is wrong."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from quire.errors import CheckpointError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.weights import choose_dtype, load_weights
from quire.models.modules.decoder import Decoder
from quire.models.modules.weight_slots import WeightTable
from quire.ops import make_ops
from quire.ops.interface.quantized_weight import StoredWeight

CPU = torch.device("cpu")
MAPS = Path("/proc/self/maps")
Tensors = dict[str, torch.Tensor]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


class RecordingTable(WeightTable):
    """A table of weights that remembers what it was given."""

    loaded: Tensors

    def load(self, name: str, tensor: torch.Tensor | StoredWeight) -> None:
        assert isinstance(tensor, torch.Tensor)
        self.loaded[name] = tensor
        super().load(name, tensor)


class Recorder(Decoder):
    """A decoder that remembers what it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loaded: Tensors = {}
        self.weights = table = RecordingTable(self.weights.slots, self.dtype, self.device, lambda: None)
        table.loaded = self.loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it: biases, an untied head, float32."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("saved")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the stored tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Recorder:
    checkpoint = Checkpoint.open(str(folder))
    spec, weight_map = build(checkpoint.config)
    decoder = Recorder(spec, ops=make_ops(CPU), dtype=dtype, device=CPU)
    load_weights(checkpoint, weight_map, decoder)
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_is_the_stored_ones_joined_and_cast(folder: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / "model.safetensors")
    decoder = load(folder, dtype)
    _, weight_map = build(Checkpoint.open(str(folder)).config)
    assert decoder.weights.missing == ()
    assert set(decoder.loaded) == set(weight_map)
    assert max(len(sources) for sources in weight_map.values()) == 3
    for name, sources in weight_map.items():
        expected = torch.cat([stored[source] for source in sources]).to(dtype)
        torch.testing.assert_close(decoder.loaded[name], expected, rtol=0, atol=0)


def test_shards_give_what_one_file_gives(folder: Path) -> None:
    whole = load(folder).loaded
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{tensor_idx % 3}.safetensors" for tensor_idx, name in enumerate(stored)}
    for shard in set(weight_map.values()):
        save_file({name: stored[name] for name in stored if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load(folder).loaded
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not tell what a process has mapped")
@pytest.mark.pairwise
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_that_is_kept_lies_in_the_file(folder: Path, dtype: torch.dtype, tied: bool, kernels: str) -> None:
    """So a file that changes later changes nothing."""
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype) for name in tensors}))
    if tied:
        rewrite(folder, drop("lm_head.weight"))
        reconfigure(folder, tie_word_embeddings=True)
    checkpoint = Checkpoint.open(str(folder))
    spec, weight_map = build(checkpoint.config)
    decoder = Decoder(spec, ops=make_ops(CPU, kernels), dtype=dtype, device=CPU)
    load_weights(checkpoint, weight_map, decoder)
    gc.collect()
    assert str(folder / "model.safetensors") not in MAPS.read_text()
    assert decoder.weights.missing == ()


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop(K_PROJ), rf"has no tensor '{K_PROJ}' \(for layers\.1\.mixer\.qkv\.weight\)"),
        (drop("lm_head.weight"), r"has no tensor 'lm_head\.weight'"),
        (put(K_PROJ, torch.ones(8, 15)), rf"'{K_PROJ}' of shape \[8, 15\].*\[32, 16\]"),
        (put(K_PROJ, torch.ones(9, 16)), r"needs shape \[32, 16\].*gives 33 rows.*k_proj.weight \[9, 16\]"),
        (put(K_PROJ, torch.ones(8)), rf"'{K_PROJ}' of shape \[8\]"),
        (put("model.norm.weight", torch.tensor(1.0)), r"'model\.norm\.weight' of shape \[\]"),
        (put(K_PROJ, torch.ones(8, 16, dtype=torch.int8)), rf"'{K_PROJ}' as I8; BF16, F16, F32"),
        (put(K_PROJ, torch.ones(8, 16).to(torch.float8_e4m3fn)), rf"'{K_PROJ}' as F8_E4M3; BF16, F16, F32"),
        (put(K_PROJ, torch.ones(8, 16, dtype=torch.float64)), rf"'{K_PROJ}' as F64; BF16, F16, F32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_before_any_is_read(
    folder: Path, change: Callable[[Tensors], object], complaint: str
) -> None:
    rewrite(folder, change)
    checkpoint = Checkpoint.open(str(folder))
    spec, weight_map = build(checkpoint.config)
    decoder = Recorder(spec, ops=make_ops(CPU), dtype=torch.float32, device=CPU)
    with pytest.raises(CheckpointError, match=complaint):
        load_weights(checkpoint, weight_map, decoder)
    assert decoder.loaded == {}


def test_leftovers_of_training_are_ignored_and_unknown_tensors_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(folder, put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2)))
    load(folder)
    assert caplog.records == []
    rewrite(folder, put("model.layers.0.mystery.weight", torch.ones(2)))
    load(folder)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "1 tensors of the checkpoint are not part of the model: model.layers.0.mystery"
    )


def test_a_stored_head_is_ignored_when_the_model_ties_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reconfigure(folder, tie_word_embeddings=True)
    assert "head.weight" not in load(folder).loaded
    assert caplog.records == []


@pytest.mark.parametrize(
    ("option", "fields", "expected"),
    [
        ("auto", {"dtype": "bfloat16"}, torch.bfloat16),
        ("auto", {"dtype": None, "torch_dtype": "float16"}, torch.float16),
        ("auto", {"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16),
        ("auto", {"dtype": None, "torch_dtype": None}, torch.float32),
        ("float16", {"dtype": "bfloat16"}, torch.float16),
        ("float32", {"dtype": "float64"}, torch.float32),
    ],
)
def test_auto_keeps_the_dtype_of_the_checkpoint(
    folder: Path, option: str, fields: dict[str, object], expected: torch.dtype
) -> None:
    reconfigure(folder, **fields)
    assert choose_dtype(option, Checkpoint.open(str(folder))) == expected


def test_auto_takes_the_dtype_of_most_weights(folder: Path) -> None:
    reconfigure(folder, dtype=None, torch_dtype=None)
    rewrite(folder, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items() if t.ndim == 2}))
    assert choose_dtype("auto", Checkpoint.open(str(folder))) == torch.bfloat16


@pytest.mark.parametrize("name", ["float64", "int8", 16, ["float32"]])
def test_auto_refuses_a_dtype_that_no_kernel_computes_in(folder: Path, name: object) -> None:
    reconfigure(folder, dtype=name)
    with pytest.raises(CheckpointError, match="auto keeps it: set dtype to one of bfloat16") as caught:
        choose_dtype("auto", Checkpoint.open(str(folder)))
    assert caught.value.field == "dtype"
