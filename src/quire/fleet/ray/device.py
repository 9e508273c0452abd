"""The device of a replica: a GPU only if Ray has assigned one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from quire.errors import ConfigError
from quire.platform.host_probe import pick_device

logger = logging.getLogger(__name__)


def device_of(option: str, gpus: Sequence[str]) -> str:
    """Return "cpu" or "cuda" for the device option of a replica.

    Ray hides no GPU from processes that have reserved none, so all of them would use the first GPU.
    """
    if not gpus:
        if option == "cuda":
            raise ConfigError(
                "device 'cuda' needs a GPU that Ray has assigned to the replica; set num_gpus to 1", field="num_gpus"
            )
        return "cpu"
    device = pick_device(option)
    if device == "cpu" and option == "auto":
        logger.warning("Ray has assigned GPU %s, but PyTorch finds none: the replica uses the CPU", ", ".join(gpus))
    return device
