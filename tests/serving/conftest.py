"""What tests of several modules serve: a tiny model, and one process with it to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import checkpoint
from tests.server.process import ServerProcess, running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One process with the same model."""
    with running(folder, tmp_path_factory.mktemp("logs") / "log", "--num-kv-blocks", "300") as server:
        yield server
