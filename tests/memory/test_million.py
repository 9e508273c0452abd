"""A short stretch of the million random commands; `python -m tests.memory.million` walks all of it."""

from __future__ import annotations

import pytest

from quire.memory.tables import BlockTables
from tests.memory.million import walk


def test_random_commands_in_worlds_of_all_kinds() -> None:
    assert sum(walk((1 << 32) + idx) for idx in range(40)) > 5_000


def test_a_violation_names_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockTables, "_copy_on_write", lambda *_: None)
    with pytest.raises(AssertionError, match="the walk with seed"):
        sum(map(walk, range(40)))
