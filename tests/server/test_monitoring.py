"""What health says of engines that a test cannot bring about in a process: dead and stuck ones."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.stats import Health
from quire.server.monitoring import health


@pytest.mark.parametrize(
    ("is_alive", "is_stuck", "is_draining", "status", "said"),
    [
        (True, False, False, 200, "ok"),
        (True, True, False, 503, "stuck"),
        (True, True, True, 503, "stuck"),
        (True, False, True, 503, "stopping"),
        (False, False, False, 503, "dead"),
    ],
)
def test_health_is_200_only_while_the_engine_makes_progress(
    is_alive: bool, is_stuck: bool, is_draining: bool, status: int, said: str
) -> None:
    engine = Health(is_alive, is_stuck, 1.25, num_running=1, num_waiting=2, num_steps=3)
    state: Any = SimpleNamespace(llm=SimpleNamespace(health=lambda: engine), is_draining=is_draining)
    response = asyncio.run(health(state, SimpleNamespace()))  # type: ignore[arg-type]
    assert response.status_code == status
    assert json.loads(bytes(response.body)) == {
        "status": said,
        "seconds_since_progress": 1.25,
        "num_running": 1,
        "num_waiting": 2,
        "num_steps": 3,
    }
