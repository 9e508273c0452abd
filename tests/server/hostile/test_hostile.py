"""Hostile requests get an answer in time and in one form, and do not disturb other requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import tool_checkpoint
from tests.server.hostile.attack import LONG, attack
from tests.server.hostile.bodies import KINDS, cases, make_case
from tests.server.hostile.runner import FLAGS
from tests.server.process import ServerProcess, running


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of its own: what it has in memory and in its log is this test's."""
    with running(tool_checkpoint.save(tmp_path / "model", "hermes"), tmp_path / "log", *FLAGS) as process:
        yield process


def test_a_request_is_a_function_of_seed_and_number() -> None:
    one, same, other = (list(cases(seed, 34)) for seed in (1, 1, 2))
    assert one == same != other
    assert make_case(1, 30) == one[30]
    assert {case.kind for case in one} == set(KINDS)


def test_some_hostile_bodies(target: ServerProcess) -> None:
    attack(target, seed=0, count=25, kinds=[kind for kind in KINDS if kind not in LONG])


@pytest.mark.slow
def test_some_thousand_hostile_bodies(target: ServerProcess) -> None:
    attack(target, seed=100, count=1500, kinds=list(KINDS))
