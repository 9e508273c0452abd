"""Starts the ranks of a model, connects their executors, and has rank 0 log the commands of its scheduler."""

from __future__ import annotations

import logging
from typing import Final

from quire.config import EngineConfig
from quire.distributed.gpu_ranks import device_of_ranks, join_devices
from quire.distributed.launch import start_ranks
from quire.distributed.ranks import Ranks
from quire.distributed.torchrun import join_torchrun, torchrun_place
from quire.engine.kv.disk_prefetch import DiskPrefetcher
from quire.errors import ConfigError
from quire.execution.runners.executor import Executor
from quire.execution.runners.ranked_executor import RankedExecutor
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.families.encoders import find_encoder
from quire.models.families.quantization_config import without_quantization
from quire.models.specs.sharding import Share, shard_spec
from quire.models.specs.spec import experts_of
from quire.models.specs.stage_spec import divide
from quire.scheduling.command_log import CommandLog
from quire.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

# By name, to avoid an import cycle: that module imports `loading`, which imports this one.
PROGRAM: Final = "quire.engine.startup.rank_process:main"


def start(config: EngineConfig) -> Ranks | None:
    """Start the other ranks of a model, of which this process is rank 0; None for a model of one process.

    If torchrun has started all ranks, they connect to each other. On GPUs, each rank uses its own GPU.
    """
    if config.parallel.num_ranks == 1:
        return None
    parallel, place = config.parallel, torchrun_place(config.parallel)
    device = device_of_ranks(config.model.device, parallel, place.num_local if place else parallel.num_ranks)
    check_shared(config)
    if place is not None:
        ranks = join_torchrun(parallel, place)
    else:
        ranks = start_ranks(parallel, {**config.to_options(), "device": device}, PROGRAM)
    if ranks.is_leader:  # other ranks do it in `rank_process.run`, which reports their errors
        try:
            join_devices(ranks, parallel, device, place)
        except BaseException:
            ranks.close()
            raise
    return ranks


def check_shared(config: EngineConfig) -> None:
    """Check that the ranks can share the model, before any of them starts."""
    checkpoint = Checkpoint.open(config.model.model, config.model.revision)
    if find_encoder(checkpoint.config) is None:  # `encoder_config` checks the options of encoders
        spec, _ = build(without_quantization(checkpoint.config))
        parallel = config.parallel
        shard_spec(spec, Share(0, parallel.tensor_parallel_size, parallel.enable_expert_parallel))
        if parallel.enable_expert_parallel and all(experts_of(layer.ffn) is None for layer in spec.layers):
            raise ConfigError(
                f"enable_expert_parallel divides experts, and {config.model.model} has none: leave it out",
                field="enable_expert_parallel",
            )
        divide(spec, parallel.pipeline_parallel_size)


def lead(
    ranks: Ranks | None,
    scheduler: Scheduler,
    executor: Executor,
    num_threads: int,
    prefetch: DiskPrefetcher | None = None,
) -> tuple[Executor, CommandLog | None]:
    """Return a rank's executor, wrapped for ranks, and the log by which rank 0's scheduler commands the others."""
    if ranks is None:
        return executor, None
    cores = ranks.cores(num_threads)
    if cores:
        logger.info("rank %d: threads on cores %s", ranks.rank, ", ".join(map(str, cores)))
    if not ranks.is_leader:
        return RankedExecutor(executor, ranks, cores), None
    log = CommandLog(scheduler, ranks.send_commands)
    if prefetch is not None:
        prefetch.log = log
    return RankedExecutor(executor, ranks, cores, log.close), log
