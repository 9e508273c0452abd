"""Calibration runs layers one at a time: what it sees is what the whole decoder computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.cli.quantization.calibration import Calibration
from quire.cli.quantization.calibration_text import read_sequences
from quire.cli.quantization.linear_layers import linear_weights
from quire.cli.quantization.paged_rows import run_sequences
from quire.cli.quantization.rounding import Scheme
from quire.errors import ConfigError, UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.models.checkpoints.tensor_reader import TensorReader
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from tests.conformance.checkpoints import FAMILIES, ragged_prompts, save_checkpoint

EIGHT = Scheme(8, 16, True, torch.float32)
SLOW = ("qwen3", "lfm2", "gemma3", "falcon-h1")


@pytest.mark.parametrize("family", ["llama3", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_layers_alone_give_what_the_whole_model_gives(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(save_checkpoint(family, tmp_path)))
    spec, weight_map = build(checkpoint.config)
    sequences = ragged_prompts()
    calibration = Calibration(spec, weight_map, TensorReader(checkpoint), sequences)
    for idx in range(len(spec.layers)):
        assert not [*calibration.quantize_layer(idx, {}, EIGHT)]
    decoder = load_decoder(checkpoint, device="cpu", dtype=torch.float32)
    ids = torch.tensor([token_id for each in sequences for token_id in each])
    whole = run_sequences(decoder, ids, [len(each) for each in sequences])
    torch.testing.assert_close(calibration._hidden, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(calibration._rounded, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "num_matrices"), [("llama3", 7), pytest.param("mixtral", 16, marks=pytest.mark.slow)]
)
def test_a_quantised_model_gives_what_calibration_saw(
    family: str, num_matrices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}
    monkeypatch.setitem(FAMILIES, "mixtral", ("Mixtral", {**FAMILIES["llama2"][1], **experts}))
    checkpoint = Checkpoint.open(str(save_checkpoint(family, tmp_path)))
    spec, weight_map = build(checkpoint.config)
    sequences = ragged_prompts()
    calibration = Calibration(spec, weight_map, TensorReader(checkpoint), sequences)
    weights = linear_weights(weight_map, checkpoint.tensors)
    scheme = Scheme(4, 32, True, torch.float32)
    found = {
        name: matrix.dequantize()
        for idx in range(len(spec.layers))
        for name, matrix in calibration.quantize_layer(idx, weights, scheme)
    }
    assert len(found) == num_matrices * len(spec.layers)
    reader = TensorReader(checkpoint)
    plain = {name: reader.read(name) for name in checkpoint.tensors if name not in found}
    folder = tmp_path / "quantised"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    save_file({**found, **{name: torch.clone(tensor) for name, tensor in plain.items()}}, folder / "model.safetensors")  # type: ignore[arg-type]
    decoder = load_decoder(Checkpoint.open(str(folder)), device="cpu", dtype=torch.float32)
    ids = torch.tensor([token_id for each in sequences for token_id in each])
    whole = run_sequences(decoder, ids, [len(each) for each in sequences])
    torch.testing.assert_close(calibration._rounded, whole, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(calibration._hidden, whole, rtol=1e-2, atol=1e-2)


def test_layers_that_read_other_layers_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(save_checkpoint("gemma4", tmp_path)))
    spec, weight_map = build(checkpoint.config)
    with pytest.raises(UnsupportedModel, match="method rounded"):
        Calibration(spec, weight_map, TensorReader(checkpoint), [[1, 2]])


def test_texts_are_divided_into_sequences(tmp_path: Path) -> None:
    folder = locate("bundled")
    text = tmp_path / "text.txt"
    text.write_text(f"One day.\n\n{'a cat ' * 1000}\n<|user|>Hi<|end|>\n")
    sequences = read_sequences(folder, text, 100_000, 1024)
    assert [len(each) for each in sequences[1:-2]] == [512] * (len(sequences) - 3)
    assert sequences[-1][1] == 3  # a special token
    assert sum(map(len, read_sequences(folder, text, 600, 1024))) == 600
    assert max(map(len, read_sequences(folder, text, 600, 7))) == 7
    (tmp_path / "chats.jsonl").write_text(
        '{"text": "One day."}\n'
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}\n'
    )
    one, chat = read_sequences(folder, tmp_path / "chats.jsonl", 600, 1024)
    assert one == sequences[0]
    assert (chat[0], chat[1], chat[-1]) == (0, 3, 5)
    assert sum(map(len, read_sequences(folder, None, 20_000, 1024))) == 20_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", " \n\n", "no line with text"),
        ("a.jsonl", '{"text": "a"}\n{"text": 1}\n', "line 2: an object with a string text"),
        ("a.jsonl", '{"messages": ["Hi"]}\n', "line 1: an object"),
        ("a.jsonl", "{\n", "line 1"),
        ("a.jsonl", '{"messages": [{"role": "cook", "content": "Hi"}]}\n', "line 1"),
        ("a.txt", b"\xff\xfe", "cannot be read"),
    ],
)
def test_bad_texts_are_refused(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        read_sequences(locate("bundled"), tmp_path / name, 100, 100)
