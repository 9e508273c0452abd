"""`quire` with an engine that fails on prompts of certain lengths, which no request should make it do."""

from __future__ import annotations

import sys
from typing import Any

from quire.cli.main import main
from quire.engine.engine import Engine
from quire.engine.outputs.outputs import RequestOutput

# Lengths of prompts, in tokens: on this one a step raises what every failure does, on that one what a panic does.
DEADLY, PANICKING = 13, 17

step = Engine.step


def step_or_die(engine: Engine, *args: Any) -> list[RequestOutput]:
    """Run a step, unless a request has a prompt of one of the lengths."""
    lengths = {sequence.num_prompt for sequence in engine.scheduler.sequences.values()}
    if DEADLY in lengths:
        raise RuntimeError("injected")
    if PANICKING in lengths:
        raise BaseException("injected")
    return step(engine, *args)


if __name__ == "__main__":
    Engine.step = step_or_die  # type: ignore[method-assign, assignment]
    sys.exit(main())
