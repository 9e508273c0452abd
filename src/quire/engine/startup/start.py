"""Loads a model: in one process, or on the ranks that share it; ranks other than 0 only follow rank 0."""

from __future__ import annotations

from contextlib import ExitStack

from quire.config import EngineConfig
from quire.engine.startup.loading import LoadedModel, load_part
from quire.engine.startup.rank_process import exit_now, run
from quire.engine.startup.ranks import start
from quire.engine.startup.wrappers import Wrappers


def load(config: EngineConfig, *, wrap: Wrappers | None = None) -> LoadedModel:
    """Load a model and build its engine; the KV memory is allocated last.

    A process that torchrun has started as a rank other than 0 exits in this call when rank 0 closes: the same program
    runs on every rank, but only rank 0 returns.

    Args:
        config: configuration of the engine.
        wrap: wrappers of the engine's parts, for measurements.

    Raises:
        ConfigError: an option or a checkpoint that cannot be honoured; the message names the fix.
    """
    with ExitStack() as stack:
        ranks = start(config)
        if ranks is not None and not ranks.is_leader:
            exit_now(run(ranks, config))
        if ranks is not None:
            stack.callback(ranks.close)  # if loading fails; afterwards the engine closes them
        loaded = load_part(config, wrap or Wrappers(), ranks)
        stack.pop_all()
    return loaded
