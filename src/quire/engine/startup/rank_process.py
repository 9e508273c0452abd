"""The processes of ranks other than 0: each loads its shard of the model, and replays the commands of rank 0."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from quire.config import EngineConfig
from quire.distributed.gpu_ranks import device_of_ranks, join_devices
from quire.distributed.launch import join_ranks
from quire.distributed.ranks import Ranks, exit_soon
from quire.distributed.torchrun import torchrun_place
from quire.engine.inputs.ranked_media import tensor_from_json, unpack
from quire.engine.startup.loading import LoadedModel, Wrappers, load_part
from quire.engine.startup.rank_facts import compare_ranks
from quire.engine.startup.ranked_adapters import FollowerSlots
from quire.errors import ConfigError, RankFailed, WorkerError
from quire.scheduling.command_log import CommandReplay

logger = logging.getLogger(__name__)

# Options that apply to rank 0 only, such as options of texts, with their values on other ranks.
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
    try:
        ranks, options = join_ranks(
            rank,
            connection,
            memory,
            lambda links, options: compare_ranks(links, EngineConfig.from_options(**options)),
        )
    except (ConfigError, WorkerError):  # rank 0 has it from this rank, or has sent it
        exit_now(1)
    exit_now(run(ranks, EngineConfig.from_options(**options)))


def exit_now(status: int) -> NoReturn:
    """End the process of a rank at once: torch threads that still run would abort a normal interpreter exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(ranks: Ranks, config: EngineConfig) -> int:
    """Follow rank 0 until it closes; return the exit status of the process."""
    # Threads of the model may wait forever if the group has failed.
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
    """Load this rank's shard of the model, and replay the commands of rank 0 until the last."""
    own = EngineConfig.from_options(**{**config.to_options(), **OF_LEADER})
    loaded = load_part(own, Wrappers(), ranks)
    engine = loaded.engine
    runs_ahead = ranks.group.runs_ahead
    others = _commands_of_parts(loaded, runs_ahead=runs_ahead)
    replay = CommandReplay(engine.scheduler, others, unpack=unpack, runs_ahead=runs_ahead)
    while not replay.is_closed:
        for plan in replay.apply(ranks.group.receive_commands()):
            engine.executor.launch(plan).result()
    ranks.expect_end()
    engine.close()
    ranks.close()


def _commands_of_parts(loaded: LoadedModel, *, runs_ahead: bool) -> dict[str, Callable[..., None]]:
    """Return the functions that repeat rank 0's commands to parts other than the scheduler; see `CommandReplay`."""
    engine, prefetch = loaded.engine, loaded.disk_prefetch
    commands: dict[str, Callable[..., None]] = {}
    if engine.adapters is not None and isinstance(engine.adapters.slots, FollowerSlots):
        commands["adapter"] = engine.adapters.slots.repeat
    if loaded.images is not None:
        images = loaded.images

        def keep(digest: str, *packed: Any) -> None:
            images.keep(bytes.fromhex(digest), tensor_from_json(*packed))

        commands["features"] = keep
    if prefetch is not None:

        def save() -> None:
            # If ranks run ahead, the plans in flight have been executed already.
            pending = engine.scheduler.memory.take_ops() if runs_ahead else engine.scheduler.take_ops()
            prefetch.save_shard(engine.executor, pending, time.monotonic)

        commands |= {
            "reset": prefetch.reset,
            "write_through": partial(prefetch.write_through, engine.executor),
            "save": save,
        }
    return commands
