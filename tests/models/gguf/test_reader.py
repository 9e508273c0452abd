"""GGUF files as another library writes them are read; damaged ones are in `tests.hostile`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from quire.cli.quantization.gguf_header import encode_header
from quire.errors import CheckpointError
from quire.models.gguf.header import read_header
from quire.models.gguf.reader import GGUFFile
from quire.models.gguf.tensor_types import TENSOR_TYPES

FIELDS: dict[str, tuple[Any, GGUFValueType]] = {
    "a.uint8": (255, GGUFValueType.UINT8),
    "a.int8": (-128, GGUFValueType.INT8),
    "a.uint16": (2**16 - 1, GGUFValueType.UINT16),
    "a.int16": (-(2**15), GGUFValueType.INT16),
    "a.uint32": (2**32 - 1, GGUFValueType.UINT32),
    "a.int32": (-(2**31), GGUFValueType.INT32),
    "a.uint64": (2**64 - 1, GGUFValueType.UINT64),
    "a.int64": (-(2**63), GGUFValueType.INT64),
    "a.float32": (1.5, GGUFValueType.FLOAT32),
    "a.float64": (0.1, GGUFValueType.FLOAT64),
    "a.true": (True, GGUFValueType.BOOL),
    "a.false": (False, GGUFValueType.BOOL),
    "a.string": ("Grüße \U0001f600\x00", GGUFValueType.STRING),
    "a.empty": ("", GGUFValueType.STRING),
    "a.strings": (["", "a", "▁the", "\U0001f600" * 50], GGUFValueType.ARRAY),
    "a.integers": ([1, -2, 3], GGUFValueType.ARRAY),
    "a.floats": ([1.0, -2.5], GGUFValueType.ARRAY),
    "a.truths": ([True, False, True], GGUFValueType.ARRAY),
}


def write(path: Path, *, split_max_tensors: int = 0, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Write a file of every kind of field and type of tensors, and return the bytes of its tensors."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    for name, (value, kind) in FIELDS.items():
        writer.add_key_value(name, value, kind)
    tensors = {}
    for block in TENSOR_TYPES.values():
        shape = (3, 2 * block.block_bytes)
        name = f"blk.0.{block.name}.weight"
        tensors[name] = rng.integers(0, 256, shape, np.uint8)
        writer.add_tensor(name, tensors[name], raw_shape=shape, raw_dtype=GGMLQuantizationType(block.id))
    tensors["norm"] = np.ones(7, np.float32)
    writer.add_tensor("norm", tensors["norm"])
    experts = tensors["experts"] = rng.integers(0, 256, (4, 3, 2 * 34), np.uint8)
    writer.add_tensor("experts", experts, raw_shape=experts.shape, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def check(file: GGUFFile, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    assert file.tensors.keys() == tensors.keys()
    for name, values in tensors.items():
        tensor = file.tensors[name]
        with tensor.path.open("rb") as stream:
            stream.seek(tensor.offset)
            assert stream.read(tensor.num_bytes) == values.tobytes()
        block = TENSOR_TYPES[tensor.type_id]
        if name.startswith("blk."):
            assert (tensor.shape, block.name) == ((3, 2 * block.block_values), name.split(".")[2])
    assert file.tensors["norm"].shape == (7,)
    assert file.tensors["experts"].shape == (4, 3, 64)


def test_a_file_is_what_another_library_wrote(tmp_path: Path) -> None:
    tensors = write(tmp_path / "model.gguf")
    file = GGUFFile.open(tmp_path / "model.gguf")
    expected = {name: value for name, (value, _) in FIELDS.items()} | {"general.architecture": "llama"}
    assert {**file.fields} == expected
    assert [type(value) for value in file.fields.values()] == [type(expected[name]) for name in file.fields]
    assert file.fields["a.truths"][0] is True
    check(file, tensors)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_what_another_library_reads_is_read_here(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for idx, size in enumerate((1, 3, 1000)):
        writer.add_tensor(f"{idx}", np.arange(size, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(path)
    assert file.fields["general.alignment"] == alignment
    for theirs in GGUFReader(path).tensors:
        ours = file.tensors[theirs.name]
        assert (ours.offset, ours.num_bytes) == (theirs.data_offset, theirs.n_bytes)
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))


def test_version_2_is_read_as_version_3(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = write(path)
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    path.write_bytes(raw)
    check(GGUFFile.open(path), tensors)


def test_a_split_file_is_read_from_its_first_part(tmp_path: Path) -> None:
    tensors = write(tmp_path / "model.gguf", split_max_tensors=5)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"model-0000{number}-of-00004.gguf" for number in range(1, 5)]
    file = GGUFFile.open(paths[0])
    check(file, tensors)
    assert file.fields["a.strings"] == FIELDS["a.strings"][0]
    assert {tensor.path for tensor in file.tensors.values()} == {*paths}
    with pytest.raises(CheckpointError, match=r"not the first part \(split\.no is 2\); name model-00001-of"):
        GGUFFile.open(paths[2])


def test_parts_must_belong_together(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", split_max_tensors=5)
    first, second, third, _ = sorted(tmp_path.iterdir())
    good = third.read_bytes()
    third.unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00004\.gguf is missing: model-00001-of-"):
        GGUFFile.open(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"00003-of-00004.gguf: split\.no is 1; as a part of .* it must be 2"):
        GGUFFile.open(first)
    third.write_bytes(good.replace(b"blk.0.Q4_K.weight", b"blk.0.Q4_0.weight"))
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.Q4_0\.weight' is in model-00001-of-00004"):
        GGUFFile.open(first)


def test_a_large_vocabulary_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tokens = [f"token{number}" * (number % 3) for number in range(256_000)]
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(number) for number in range(256_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = GGUFFile.open(path)
    assert file.fields["tokenizer.ggml.tokens"] == tokens
    assert file.fields["tokenizer.ggml.scores"][-1] == 255_999.0


def test_reading_a_header_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    code = (
        "import sys; from pathlib import Path; from quire.models.gguf.reader import GGUFFile; "
        "GGUFFile.open(Path(sys.argv[1])); print(*{'torch', 'numpy', 'gguf'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.gguf")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == ""


def test_descriptions_may_be_in_another_encoding(tmp_path: Path) -> None:
    """They are not needed; what a tokenizer is made of is refused."""
    path = tmp_path / "model.gguf"
    for name, is_read in (("general.name", True), ("tokenizer.chat_template", False)):
        header = encode_header({name: "Caf_"}, [])
        path.write_bytes(header.replace(b"Caf_", b"Caf\xe9"))
        if is_read:
            assert read_header(path).fields == {name: "Caf\ufffd"}
        else:
            with pytest.raises(CheckpointError, match=r"'tokenizer\.chat_template' is not UTF-8 at its byte 3"):
                read_header(path)
