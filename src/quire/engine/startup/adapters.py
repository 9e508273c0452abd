"""The adapters that an engine loads at its start."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from quire.config import LoRAConfig
from quire.engine.adapters import AdapterRegistry
from quire.errors import ConfigError, RequestError
from quire.models.checkpoint import Checkpoint
from quire.models.decoder import Decoder
from quire.models.loading import make_adapter_slots
from quire.sequences.lora import LoRARequest
from quire.sequences.sequence import Request

logger = logging.getLogger(__name__)


def load_adapters(
    config: LoRAConfig, checkpoint: Checkpoint, decoder: Decoder, requests: Mapping[str, Request], model_name: str
) -> AdapterRegistry | None:
    """Let a decoder take adapters, and load those of the configuration; None where it enables none.

    Args:
        config: options of adapters.
        checkpoint: files that the decoder was loaded from.
        decoder: decoder with all its weights.
        requests: unfinished requests of the engine, by id.
        model_name: name of the model.

    Raises:
        ConfigError: one of the adapters cannot be loaded.
    """

    if not config.enable_lora:
        return None

    def used_slots() -> list[int | None]:
        return [request.adapter for request in requests.values()]

    slots = make_adapter_slots(checkpoint, decoder, config.max_lora_rank)
    registry = AdapterRegistry(slots, config.max_adapters, used_slots, model_name)
    for name, path in config.adapters.items():
        try:
            registry.load(LoRARequest(name, lora_path=path), registry.read(path))
        except RequestError as error:
            raise ConfigError(f"lora_modules: {error}", field="lora_modules") from error
        logger.info("Adapter %s: loaded from %s", name, path)
    return registry
