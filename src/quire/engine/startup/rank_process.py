"""The processes of ranks other than 0: each loads its part of the model, and repeats the commands of rank 0."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from quire.config import EngineConfig
from quire.distributed.launch import join_ranks
from quire.distributed.ranks import Ranks, exit_soon
from quire.engine.startup.loading import load
from quire.errors import RankFailed
from quire.scheduling.command_log import CommandReplay

logger = logging.getLogger(__name__)

# Options of what rank 0 alone does: it has the texts.
OF_LEADER: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "tokenizer": None,
    "chat_template": None,
    "classifier_from_token": None,
    "record_memory": None,
    "kv_events_config": None,
}
# Time that a rank has to end after another has failed.
EXIT_TIMEOUT_S = 3.0


def main(rank: int, size: int, connection: int, memory: int) -> None:
    """Run a rank that `start` has started, until rank 0 closes or a rank fails."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s")
    ranks, options = join_ranks(rank, size, connection, memory)
    os._exit(run(ranks, EngineConfig.from_options(**options)))


def run(ranks: Ranks, config: EngineConfig) -> int:
    """Follow rank 0 until it closes; return the exit status of the process."""
    # Threads of the model may wait for ever where the group has failed.
    ranks.on_failure(lambda _: exit_soon(EXIT_TIMEOUT_S, 1))
    try:
        follow(ranks, config)
    except RankFailed as error:
        logger.error("%s", ranks.cause_of(error))
        return 1
    except BaseException as error:
        if ranks.failure is None:
            logger.exception("rank %d cannot go on", ranks.rank)
            ranks.links.report(error)
        return 1
    finally:
        sys.stderr.flush()
    return 0


def follow(ranks: Ranks, config: EngineConfig) -> None:
    """Load this rank's part of the model, and repeat the commands of rank 0 until the last.

    Raises:
        ConfigError: the model cannot be loaded.
        WorkerError: a step failed, a rank has failed, or ranks have come to differ.
    """
    own = EngineConfig.from_options(**{**config.to_options(), **OF_LEADER})
    engine = load(own, ranks=ranks).engine
    replay = CommandReplay(engine.scheduler)
    while not replay.is_closed:
        for plan in replay.apply(ranks.group.receive_commands()):
            engine.executor.execute(plan)
    ranks.expect_end()
