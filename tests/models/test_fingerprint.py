"""The fingerprint of a model: another one wherever its KV could be another, and the same elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.models.loading.fingerprint import MAX_KNOWN, MAX_KNOWN_BYTES, fingerprint

LAYOUT = ["bfloat16", "16 tokens"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the bundled model."""
    return Path(shutil.copytree(locate("bundled"), tmp_path / "model"))


def of(folder: Path, known: Path, layout: list[str] = LAYOUT) -> bytes:
    return fingerprint(Checkpoint.open(str(folder)), layout, known)


def test_it_is_the_same_wherever_the_files_lie(folder: Path, tmp_path: Path) -> None:
    expected = of(folder, tmp_path / "known.json")
    assert len(expected) == 16
    assert of(folder, tmp_path / "known.json") == expected
    assert of(folder, tmp_path / "other.json") == expected
    assert of(locate("bundled"), tmp_path / "known.json") == expected
    assert of(folder.rename(tmp_path / "moved"), tmp_path / "known.json") == expected


def test_a_byte_of_the_weights_changes_it(folder: Path, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    before = of(folder, known)
    file = folder / "model.safetensors"
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    # Nor does putting the old times back hide it.
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert of(folder, known) != before
    data[-100] ^= 1
    file.write_bytes(data)
    assert of(folder, known) == before


def test_configuration_and_layout_change_it(folder: Path, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    before = of(folder, known)
    assert of(folder, known, ["float32", "16 tokens"]) != before
    assert of(folder, known, ["bfloat1616 tokens"]) != before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert of(folder, known) != before


def test_a_file_is_read_once(folder: Path, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    of(folder, known)
    remembered = json.loads(known.read_text())
    assert len(remembered) == 1
    known.write_text(json.dumps(dict.fromkeys(remembered, "what is remembered is believed")))
    assert of(folder, known) != of(folder, tmp_path / "other.json")


@pytest.mark.parametrize("content", ["", "[]", "{", "7"])
def test_what_is_remembered_may_be_damaged(folder: Path, tmp_path: Path, content: str) -> None:
    known = tmp_path / "known.json"
    expected = of(folder, known)
    known.write_text(content)
    assert of(folder, known) == expected


def test_the_last_digests_are_remembered_and_no_more_than_can_be_read(folder: Path, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    of(folder, known)
    own = json.loads(known.read_text())
    others = {json.dumps([64769, number, 1 << 40, 2 * 10**18, 2 * 10**18]): "a" * 64 for number in range(MAX_KNOWN)}
    known.write_text(json.dumps(others))
    of(folder, known)
    remembered = json.loads(known.read_text())
    assert len(remembered) == MAX_KNOWN
    assert own.items() <= remembered.items()
    assert known.stat().st_size <= MAX_KNOWN_BYTES
