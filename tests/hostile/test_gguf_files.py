"""Whatever a GGUF file holds: opening it works, or fails with a typed error, within bounds of memory."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import MAX_SHOWN, CheckpointError
from quire.models.checkpoints.tensor_reader import MappedFile
from quire.models.gguf.architectures import TensorSource
from quire.models.gguf.header import MAX_HEADER_BYTES, _HeaderReader
from quire.models.gguf.opening import stored_tensor
from quire.models.gguf.reader import GGUFFile
from quire.ops.interface.quantized_weight import QuantizedWeight
from quire.platform.bounded.process import BoundedProcess
from tests.hostile.gguf_files import GGUFMaker, good, largest, open_reader

KINDS = (*GGUFMaker().kinds,)
MOST_BYTES = 200 * 10**6
TIMEOUT_S = 30.0


def read_all(file: GGUFFile) -> int:
    """Read all tensors of a file, and return the number of their values."""
    num_values = 0
    for tensor in file.tensors.values():
        stored = stored_tensor(tensor, TensorSource(tensor.name, None, None, None, None, None, tensor.shape))
        assert stored.decode is not None
        weight = stored.decode(MappedFile(stored).bytes_of(stored))
        num_values += (weight.dequantize() if isinstance(weight, QuantizedWeight) else weight).numel()
    return num_values


def attempt(path: Path) -> str:
    """Open a file and read its tensors; return what came of it, and let pass no error but that of a checkpoint."""
    tracemalloc.start()
    try:
        file = GGUFFile.open(path)
        said = f"opened: {read_all(file)} values"
    except CheckpointError as error:
        said = f"refused: {error}"
        assert str(path.parent) in said
        assert len(said.replace(str(path.parent), "")) < 4 * MAX_SHOWN + 200
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES, f"{path}: {said}"
    return said


def attempts(folder: Path, kind: str, seeds: range) -> list[str]:
    maker, said = GGUFMaker(), []
    for seed in seeds:
        inner = folder / f"{seed}"
        inner.mkdir()
        said.append(attempt(maker.make(inner, kind, seed)).replace(str(inner), ""))
    return said


def test_a_good_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(good().encoded())
    assert attempt(path) == "opened: 2512 values"


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_or_harmless(tmp_path: Path, kind: str) -> None:
    said = attempts(tmp_path, kind, range(9))
    assert any(each.startswith("refused: ") for each in said)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_damaged_file_does_harm(tmp_path: Path, kind: str) -> None:
    said = attempts(tmp_path, kind, range(1000, 1060))
    assert len(set(said)) > 4


@pytest.fixture
def process() -> Iterator[BoundedProcess]:
    """A process that opens files, and may take little memory more than it has at its beginning.

    Each test has its own: what files before have left unused is not returned to the system, and counts.
    """
    assert callable(open_reader(b""))
    bounded = BoundedProcess("tests.hostile.gguf_files:open_reader", b"", MOST_BYTES)
    yield bounded
    bounded.close()


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("strings", "opened: 1 fields, 0 tensors"),
        pytest.param("wide strings", "opened: 7 fields, 0 tensors", marks=pytest.mark.slow),
        pytest.param("integers", "opened: 1 fields, 0 tensors", marks=pytest.mark.slow),
        pytest.param("fields", "opened: 32768 fields, 0 tensors", marks=pytest.mark.slow),
        pytest.param("tensors", "opened: 0 fields, 32768 tensors", marks=pytest.mark.slow),
        ("values", "all arrays together may have 2,097,152 values"),
        ("bytes", "a header may have 33,554,432 bytes"),
    ],
)
def test_the_largest_headers_take_bounded_memory(
    process: BoundedProcess, tmp_path: Path, which: str, expected: str
) -> None:
    path = largest(tmp_path, which)
    assert expected in process.ask(os.fsencode(path), TIMEOUT_S).decode()


@pytest.mark.parametrize("kind", ["counts", "offsets", "shapes", "file"])
def test_damaged_files_end_no_process(process: BoundedProcess, tmp_path: Path, kind: str) -> None:
    maker = GGUFMaker()
    for seed in range(9):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        path = maker.make(folder, kind, seed)
        if "\0" not in str(path):
            assert process.ask(os.fsencode(path), TIMEOUT_S).startswith((b"opened: ", b"refused: "))


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(good().encoded())
    with path.open("rb") as stream:
        reader = _HeaderReader(path, stream, MAX_HEADER_BYTES)
        os.truncate(path, 100)
        with pytest.raises(CheckpointError, match=r"became shorter while .* was read"):
            reader.read()
