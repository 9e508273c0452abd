"""Hostile requests through a router: an answer to each, in time and in one form, and no memory that stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import tool_checkpoint
from tests.server.hostile.attack import LONG, attack
from tests.server.hostile.bodies import KINDS, MAX_BODY
from tests.server.hostile.runner import FLAGS
from tests.server.process import ServerProcess, running
from tests.serving.fleets import router_before


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ServerProcess]:
    """A router before a server; what it has in memory and in its log is this test's."""
    model = tool_checkpoint.save(tmp_path / "model", "hermes")
    with (
        running(model, tmp_path / "server.log", *FLAGS) as server,
        # Both have the limit that long bodies are near to, or above.
        router_before(server, tmp_path / "router.log", "--max-body-bytes", str(MAX_BODY)) as router,
    ):
        yield router


def test_some_hostile_bodies_through_a_router(target: ServerProcess) -> None:
    attack(target, seed=0, count=25, kinds=[kind for kind in KINDS if kind not in LONG])


@pytest.mark.slow
def test_a_thousand_hostile_bodies_through_a_router(target: ServerProcess) -> None:
    attack(target, seed=200, count=1000, kinds=list(KINDS))
