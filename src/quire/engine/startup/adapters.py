"""The adapters that an engine loads at its start."""

from __future__ import annotations

import logging
from functools import partial

from quire.config import LoRAConfig
from quire.distributed.gpu_ranks import on_gpu
from quire.distributed.ranks import RankCalls, Ranks, answer_calls
from quire.engine.adapters import AdapterRegistry, DataPlaneSlots
from quire.engine.startup.ranked_adapters import FollowerSlots, LeaderSlots
from quire.errors import CheckpointError, ConfigError, RequestError
from quire.models.adapters.slots import AdapterSlots
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import make_adapter_slots
from quire.models.modules.causal_model import CausalModel
from quire.platform.bounded.files import user_path
from quire.scheduling.command_log import CommandStream
from quire.scheduling.scheduler import Scheduler
from quire.sequences.lora import LoRARequest

logger = logging.getLogger(__name__)


def take_adapters(
    config: LoRAConfig, checkpoint: Checkpoint, decoder: CausalModel, ranks: Ranks | None = None
) -> AdapterSlots | None:
    """Prepare a decoder for adapters, and read the configured ones; None if adapters are not enabled.

    It is called before the decoder's memory is measured and steps are captured, since some steps use adapters.
    """
    if not config.enable_lora:
        return None
    slots = make_adapter_slots(checkpoint, decoder, config.max_lora_rank, None if ranks is None else ranks.group)
    try:
        slots.read_ahead(user_path(path) for path in config.adapters.values())
    except CheckpointError as error:
        raise ConfigError(f"lora_modules: {error}", field="lora_modules") from error
    return slots


def load_adapters(
    config: LoRAConfig,
    own: AdapterSlots | None,
    scheduler: Scheduler,
    model_name: str,
    ranks: Ranks | None = None,
    commands: CommandStream | None = None,
    adapter_bytes: int | None = None,
) -> AdapterRegistry | None:
    """Load the adapters of a configuration; None if the decoder takes none.

    On other ranks than 0, nothing is loaded until rank 0 commands it.
    """
    if own is None:
        return None
    if adapter_bytes is not None:
        own.memory.allow(adapter_bytes)

    def used_slots() -> list[int | None]:
        return [request.adapter for request in scheduler.requests.values()]

    slots: DataPlaneSlots = own
    if ranks is not None and commands is None:
        slots = FollowerSlots(own, config.max_adapters)
        answer_calls(ranks.links, on_gpu(ranks.gpu, slots.answer))
        return AdapterRegistry(slots, config.max_adapters, used_slots, model_name)
    if ranks is not None and commands is not None:
        slots = LeaderSlots(own, RankCalls(ranks.links, ranks.size), partial(commands.put, "adapter"))
    registry = AdapterRegistry(slots, config.max_adapters, used_slots, model_name)
    for name, path in config.adapters.items():
        try:
            registry.load(LoRARequest(name, lora_path=path), registry.read(path))
        except RequestError as error:
            raise ConfigError(f"lora_modules: {error}", field="lora_modules") from error
        logger.info("Adapter %s: loaded from %s", name, path)
    return registry
