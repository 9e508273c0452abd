"""Loads a model: in one process, or on ranks that share it, which are started here and only follow rank 0."""

from __future__ import annotations

from typing import Final

from quire.config import EngineConfig
from quire.distributed.gpu_ranks import device_of_ranks, join_devices
from quire.distributed.launch import start_ranks
from quire.distributed.links import RankLinks
from quire.distributed.ranks import Ranks
from quire.distributed.torchrun import check_size, join_torchrun, torchrun_place
from quire.engine.startup.loading import LoadedModel, Wrappers, load_part
from quire.engine.startup.rank_facts import compare_ranks
from quire.engine.startup.rank_process import exit_now, run
from quire.errors import ConfigError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families.encoders import find_encoder
from quire.models.hosted.choice import one_process_only, read_decoder
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.sharding import Share, shard_spec
from quire.models.specs.spec import experts_of
from quire.models.specs.stage_spec import divide

# The function that a process of another rank runs, by its name.
PROGRAM: Final = "quire.engine.startup.rank_process:main"


def load(config: EngineConfig, *, wrap: Wrappers | None = None) -> LoadedModel:
    """Load a model and build its engine; if that fails, all that was opened for it is closed.

    A process that torchrun has started as a rank other than 0 exits in this call when rank 0 closes: the same program
    runs on every rank, but only rank 0 returns.

    Args:
        config: configuration of the engine.
        wrap: wrappers of the engine's parts, for measurements.

    Raises:
        ConfigError: an option or a checkpoint that cannot be honoured; the message names the fix.
    """
    ranks = start(config)
    if ranks is not None and not ranks.is_leader:
        exit_now(run(ranks, config))
    return load_part(config, wrap or Wrappers(), ranks)


def start(config: EngineConfig) -> Ranks | None:
    """Start the other ranks of a model, of which this process is rank 0; None for a model of one process.

    If torchrun has started all ranks, they connect to each other. On GPUs, each rank uses its own GPU.
    """
    if config.parallel.num_ranks == 1:
        return None
    parallel, place = config.parallel, torchrun_place(config.parallel)
    device = ""

    def check() -> None:
        nonlocal device
        device = device_of_ranks(config.model.device, parallel, place.num_local if place else parallel.num_ranks)
        check_shared(config)

    def compare(links: RankLinks) -> None:
        if place is not None:  # with torchrun, an error here is one of all ranks, which are connected already
            check_size(parallel, place)
            check()
        compare_ranks(links, config)

    if place is not None:
        ranks = join_torchrun(parallel, place, compare)
    else:
        check()
        ranks = start_ranks(parallel, {**config.to_options(), "device": device}, PROGRAM, compare)
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
        spec = read_decoder(checkpoint.config, config.model.model_impl).spec
        parallel = config.parallel
        if isinstance(spec, HostedSpec):
            raise one_process_only()
        shard_spec(spec, Share(0, parallel.tensor_parallel_size, parallel.enable_expert_parallel))
        if parallel.enable_expert_parallel and all(experts_of(layer.ffn) is None for layer in spec.layers):
            raise ConfigError(
                f"enable_expert_parallel divides experts, and {config.model.model} has none: leave it out",
                field="enable_expert_parallel",
            )
        divide(spec, parallel.pipeline_parallel_size)
