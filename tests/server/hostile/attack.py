"""An attack by hostile requests, as the tests of a server and of a router make it."""

from __future__ import annotations

import asyncio

from tests.server.hostile.bodies import made_apart
from tests.server.hostile.runner import Attack
from tests.server.process import ServerProcess

# What the heap keeps of bodies that were parsed differs from run to run, by up to 91 MiB, and does not grow with their
# number: 43 MiB after 20,000 of them, and by up to 75 MiB at a router. Were bodies kept, 4,000 would be some 730 MiB.
MOST_GROWTH = 128 << 20
# They hold others up until the machine is done with them, and take most of the time.
LONG = {"long"}


def attack(target: ServerProcess, seed: int, count: int, kinds: list[str]) -> None:
    """Send bodies, and fail where anything happened that should not."""
    with made_apart(seed, count, kinds) as bodies, made_apart(seed + 1, max(20, count // 4), kinds) as warm_up:
        report = asyncio.run(Attack(target).run(bodies, warm_up))
    assert not report.problems, "\n".join(report.problems[:20])
    assert report.growth <= MOST_GROWTH
    assert set(report.delays_s) == {"whole", "stream", "/health"}
    assert {200, 400} <= set(report.statuses)
    assert target.stop() == 0
