"""An engine that ends its process in the step of a prompt of one length, as a request that finds a bug would."""

from __future__ import annotations

import os
import signal
from typing import Any

from quire.engine.engine import Engine
from quire.engine.outputs.outputs import RequestOutput

# Tokens of the prompt.
DEADLY = 701

_step = Engine.step


def step_or_end(engine: Engine, *args: Any) -> list[RequestOutput]:
    """Run a step, unless a request has the prompt."""
    if any(sequence.num_prompt == DEADLY for sequence in engine.scheduler.sequences.values()):
        os.kill(os.getpid(), signal.SIGKILL)
    return _step(engine, *args)


Engine.step = step_or_end  # type: ignore[method-assign, assignment]
