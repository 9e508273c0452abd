"""The processes of ranks other than 0: each loads its shard of the model, and replays the commands of rank 0."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any, NoReturn

from quire.config import EngineConfig
from quire.distributed.gpu_ranks import device_of_ranks, join_devices
from quire.distributed.launch import join_ranks
from quire.distributed.ranks import Ranks, exit_soon
from quire.distributed.torchrun import torchrun_place
from quire.engine.kv.ranked_prefetch import FollowerPrefetcher
from quire.engine.startup.loading import LoadedModel, load_part
from quire.engine.startup.ranked_adapters import FollowerSlots
from quire.engine.startup.wrappers import Wrappers
from quire.errors import RankFailed
from quire.scheduling.command_log import CommandReplay

logger = logging.getLogger(__name__)

# Options of work that only rank 0 does, since only it handles texts, with their values on other ranks.
OF_LEADER: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "tokenizer": None,
    "tokenizer_pre": None,
    "chat_template": None,
    "classifier_from_token": None,
    "record_memory": None,
    "kv_events_config": None,
}
# Time limit for a rank to exit after another has failed.
EXIT_TIMEOUT_S = 3.0


def main(rank: int, connection: int, memory: int) -> None:
    """Run a rank that `start` has started, until rank 0 closes or a rank fails."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s")
    ranks, options = join_ranks(rank, connection, memory)
    exit_now(run(ranks, EngineConfig.from_options(**options)))


def exit_now(status: int) -> NoReturn:
    """End the process of a rank at once: torch threads that still run would abort a normal interpreter exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(ranks: Ranks, config: EngineConfig) -> int:
    """Follow rank 0 until it closes; return the exit status of the process."""
    # Threads of the model may wait forever where the group has failed.
    ranks.on_failure(lambda _: exit_soon(EXIT_TIMEOUT_S, 1))
    try:
        parallel, place = config.parallel, torchrun_place(config.parallel)
        join_devices(ranks, parallel, device_of_ranks(config.model.device, parallel, ranks.num_local), place)
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
    """Load this rank's shard of the model, and replay the commands of rank 0 until the last.

    Raises:
        ConfigError: the model cannot be loaded.
        WorkerError: a step failed, a rank has failed, or ranks have come to differ.
    """
    own = EngineConfig.from_options(**{**config.to_options(), **OF_LEADER})
    loaded = load_part(own, Wrappers(), ranks)
    engine = loaded.engine
    runs_ahead = ranks.group.runs_ahead
    replay = CommandReplay(engine.scheduler, LoadedParts(loaded, runs_ahead=runs_ahead), runs_ahead=runs_ahead)
    while not replay.is_closed:
        for plan in replay.apply(ranks.group.receive_commands()):
            engine.executor.execute(plan)
    ranks.expect_end()
    engine.close()


class LoadedParts:
    """The components of this rank, other than the scheduler, that follow rank 0.

    Args:
        loaded: the model, with its engine.
        runs_ahead: see `RankGroup`.
    """

    def __init__(self, loaded: LoadedModel, *, runs_ahead: bool = False) -> None:
        self._runs_ahead = runs_ahead
        self._engine, self._disk_prefetch = loaded.engine, loaded.disk_prefetch

    def put_adapter(self, slot: int, digest: str | None, folder: str | None) -> None:
        """See `FollowingParts`."""
        adapters = self._engine.adapters
        assert adapters is not None, "every rank has the same options"
        assert isinstance(adapters.slots, FollowerSlots)
        adapters.slots.repeat(slot, digest, folder)

    def reset(self) -> None:
        """See `FollowingParts`."""
        if self._disk_prefetch is not None:
            self._disk_prefetch.reset()

    def write_through(self) -> None:
        """See `FollowingParts`."""
        self._prefetch.write_through(self._engine.executor)

    def save(self) -> None:
        """See `FollowingParts`."""
        scheduler = self._engine.scheduler
        # Where ranks run ahead, the plans in flight have been executed already.
        pending = scheduler.memory.take_ops() if self._runs_ahead else scheduler.take_ops()
        self._prefetch.repeat_save(self._engine.executor, pending, time.monotonic)

    @property
    def _prefetch(self) -> FollowerPrefetcher:
        assert isinstance(self._disk_prefetch, FollowerPrefetcher), "every rank has the same options"
        return self._disk_prefetch
