"""Queries, keys and values in one tensor, as llama.cpp's converter writes them with `--fuse-qkv`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from quire.errors import CheckpointError
from quire.models.gguf.architectures import read_architecture
from quire.ops.reference.reference_ops import ReferenceOps
from tests.models.gguf.cases import GGUF_CASES, save_checkpoint
from tests.models.gguf.test_architectures import read, write
from tests.models.gguf.test_models import stored_decoder
from tests.models.gguf.writer import TypeOf, f32, fuse_qkv, write_gguf
from tests.models.tiny import PagedRun, random_tokens


@pytest.mark.parametrize("name", [name for name in GGUF_CASES if not name.startswith(("phi3", "gpt2"))])
def test_parts_are_the_tensors_that_were_joined(name: str, tmp_path: Path) -> None:
    written = write(name, tmp_path)
    fused = fuse_qkv(written.stored)
    assert any("attn_qkv.weight" in tensor and tensor not in written.stored for tensor in fused)
    config, sources = read_architecture(written.fields, written.shapes, written.floats)
    shapes = {tensor: tuple(values.shape) for tensor, values in fused.items()}
    found, parts = read_architecture(written.fields, shapes, written.floats)
    assert found == config
    assert parts.keys() == sources.keys()
    for tensor, expected in sources.items():
        values, wanted = (
            torch.cat([read(each, of) for each in every])
            for every, of in ((parts[tensor], fused), (expected, written.stored))
        )
        assert torch.equal(values, wanted), tensor


def q8_0(_name: str, shape: tuple[int, ...]) -> Type:
    """Return a type of blocks, where they divide the rows."""
    return Type.F16 if shape[-1] % 32 else Type.Q8_0


@pytest.mark.parametrize("type_of", [f32, q8_0])
@pytest.mark.parametrize("name", ["llama-linear-rope-biases", "qwen2", "qwen3.5", "gemma4"])
def test_a_file_gives_the_same_logits(name: str, type_of: TypeOf, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    tokens = random_tokens(20)
    logits = [
        PagedRun(
            stored_decoder(write_gguf(tmp_path, tmp_path / f"{fuses}.gguf", type_of, fuses_qkv=fuses), ReferenceOps())
        ).step({0: tokens})[0]
        for fuses in (False, True)
    ]
    assert torch.equal(*logits)


def test_rows_must_be_those_of_the_heads(tmp_path: Path) -> None:
    written = write("llama", tmp_path)
    shapes = {tensor: tuple(values.shape) for tensor, values in fuse_qkv(written.stored).items()}
    rows, width = shapes["blk.1.attn_qkv.weight"]
    with pytest.raises(CheckpointError, match=f"'blk.1.attn_qkv.weight' has {rows + 1} rows, and the layer's queries"):
        read_architecture(written.fields, shapes | {"blk.1.attn_qkv.weight": (rows + 1, width)}, written.floats)
