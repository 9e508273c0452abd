"""A command that is killed at any moment leaves no process behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.serving.parent_kills import MOMENTS, PARENTS, kill

pytestmark = pytest.mark.slow

# Processes beside the command itself, once it serves.
FEWEST = {"server": 0, "ranks": 1, "replicas": 2}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", PARENTS)
def test_a_killed_command_leaves_no_process(kind: str, moment: str, folder: Path) -> None:
    num_processes, left = kill(kind, moment, folder, random.Random(f"{kind} {moment}"))
    assert left == []
    assert moment == "start" or num_processes > FEWEST[kind]
