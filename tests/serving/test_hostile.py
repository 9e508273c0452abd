"""Hostile requests through a router: an answer to each, in time and in one form, and no memory that stays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import tool_checkpoint
from tests.server.hostile.bodies import KINDS, made_apart
from tests.server.hostile.runner import FLAGS, Attack
from tests.server.process import ServerProcess, running
from tests.serving.fleets import router_before

# What the heap keeps of long bodies differs from run to run, as at the server, by up to 75 MiB.
MOST_GROWTH = 128 << 20
LONG = {"long"}


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ServerProcess]:
    """A router before a server; what it has in memory and in its log is this test's."""
    model = tool_checkpoint.save(tmp_path / "model", "hermes")
    with (
        running(model, tmp_path / "server.log", *FLAGS) as server,
        router_before(server, tmp_path / "router.log") as router,
    ):
        yield router


def attack(target: ServerProcess, seed: int, count: int, kinds: list[str]) -> None:
    """Send bodies, and fail where anything happened that should not."""
    with made_apart(seed, count, kinds) as bodies, made_apart(seed + 1, max(20, count // 4), kinds) as warm_up:
        report = asyncio.run(Attack(target).run(bodies, warm_up))
    assert not report.problems, "\n".join(report.problems[:20])
    assert report.growth <= MOST_GROWTH
    assert set(report.delays_s) == {"whole", "stream", "/health"}
    assert {200, 400} <= set(report.statuses)
    assert target.stop() == 0


def test_some_hostile_bodies_through_a_router(target: ServerProcess) -> None:
    attack(target, seed=0, count=25, kinds=[kind for kind in KINDS if kind not in LONG])


@pytest.mark.slow
def test_a_thousand_hostile_bodies_through_a_router(target: ServerProcess) -> None:
    attack(target, seed=200, count=1000, kinds=list(KINDS))
