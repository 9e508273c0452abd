"""`quire inspect`: what a checkpoint holds, from its headers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from quire.cli.main import main
from quire.models.checkpoints.checkpoint import locate
from tests.models.gguf.writer import write_gguf


def test_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "bundled"]) == 0
    out = capsys.readouterr().out
    assert "format        safetensors\n" in out
    assert "architecture  LlamaForCausalLM\n" in out
    assert "4 layers of 256, 2,048 tokens in the vocabulary, contexts of up to 1,024 tokens" in out
    assert "BF16" in out


def test_a_file_and_its_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def type_of(name: str, _shape: tuple[int, ...]) -> Type:
        return Type.Q8_0 if "attn" in name else Type.Q4_1

    path = write_gguf(locate("bundled"), tmp_path / "model.gguf", type_of, pre="gpt-2")
    assert main(["inspect", str(path), "--metadata"]) == 0
    out = capsys.readouterr().out
    assert "format        GGUF\n" in out
    assert "codes of 8 bits, groups of 32 inputs, float16 scales\n" in out
    assert "codes of 4 bits, groups of 32 inputs, float16 scales, minima\n" in out
    assert "general.architecture  'llama'" in out
    assert "tokenizer.ggml.tokens  '2048 values'" in out
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_layers"] == 4
    assert sum(use["num_bytes"] for use in found["types"]) < path.stat().st_size
    assert {use["type"]: use["num_tensors"] for use in found["types"]} == {"Q4_1": 13, "Q8_0": 16, "F32": 9}


def test_quantised_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "int4"
    assert main(["quantize", "bundled", str(target), "--to", "int4", "--method", "rounded"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(target)]) == 0
    out = capsys.readouterr().out
    assert "format        safetensors, CompressedTensors\n" in out
    assert re.search(r"I32 +28 .* parts of quantised layers, at the stored values\n", out)
    assert re.search(r"BF16 +28 .* parts of quantised layers, at the stored values\n", out)
    assert re.search(r"BF16 +10 .* as they are\n", out)


def test_what_would_be_refused_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((locate("bundled") / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "modelopt"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 1
    assert "would be refused: the checkpoint is quantised by the method 'modelopt'" in capsys.readouterr().out


def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main(["inspect", str(tmp_path / "model.gguf")]) == 2
    assert capsys.readouterr().err.startswith("quire: error: ")
