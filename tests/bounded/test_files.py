"""Files of others are read whole or refused at once: no pipe is waited for, and no device read for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.platform.bounded.files import read_file, read_json


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_file(path, 100) == b"x" * 100
    (tmp_path / "link").symlink_to(path)
    assert read_file(tmp_path / "link", 1000) == b"x" * 100
    with pytest.raises(OSError, match="longer than 99 bytes"):
        read_file(path, 99)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="longer than 100 bytes"):
        read_file(path, 100)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "zero", ".", "loop", "missing"):
        with pytest.raises(OSError):  # noqa: PT011 - of every kind
            read_file(tmp_path / name, 1 << 20)


def test_files_of_json_may_have_what_bodies_may_not(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for text in ('{"limit": [0.0, Infinity]}', "[NaN]"):
        path.write_text(text)
        assert read_json(path, 100)
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32-le"):
        path.write_text('["é"]', encoding=encoding)
        assert read_json(path, 100) == ["é"]
    for text in ("", "{", "[" * 1000, "[" * 100 + "]" * 99, '"\\ud800"', "[" * 129 + "]" * 129, "9" * 5000):
        path.write_text(text)
        with pytest.raises(ValueError):  # noqa: PT011 - of every kind
            read_json(path, 10_000)


def test_a_folder_leaves_no_descriptor_open(tmp_path: Path) -> None:
    num_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(tmp_path, 100)
    assert len(os.listdir("/proc/self/fd")) == num_before
