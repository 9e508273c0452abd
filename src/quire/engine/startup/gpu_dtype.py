"""The dtype of a model on a GPU that may not support bfloat16."""

from __future__ import annotations

import logging

import torch

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

# Least compute capability of GPUs that compute in bfloat16.
BFLOAT16_CAPABILITY = (8, 0)


def dtype_on(device: str, dtype: torch.dtype, option: str) -> torch.dtype:
    """Return the dtype of the weights on a device: float16 if the GPU has no bfloat16 and `option` is "auto".

    Args:
        device: "cpu" or "cuda".
        dtype: dtype that results from the option and the checkpoint.
        option: value of the option `dtype`.

    Raises:
        ConfigError: see `dtype_for`.
    """
    return dtype if device != "cuda" else dtype_for(torch.cuda.get_device_capability(), dtype, option)


def dtype_for(capability: tuple[int, int], dtype: torch.dtype, option: str) -> torch.dtype:
    """Return the dtype of the weights for a compute capability; see `dtype_on`."""
    if dtype != torch.bfloat16 or capability >= BFLOAT16_CAPABILITY:
        return dtype
    found = f"compute capability {capability[0]}.{capability[1]}, and bfloat16 needs 8.0"
    if option != "auto":
        raise ConfigError(f"dtype 'bfloat16' was asked for, but this GPU has {found}; use 'float16'", field="dtype")
    logger.warning("The weights of bfloat16 are rounded to float16: this GPU has %s", found)
    return torch.float16
