"""Quantised weights of safetensors checkpoints, read into `quire.ops.interface.quantized_weight.QuantizedWeight`.

A method is a file, and a row in `METHODS`. The stored tensors decide which layers are quantised, since lists of
exceptions in a `quantization_config` are often incomplete; the configuration decides how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.models.families.hf_config import HFConfig
from quire.models.families.quantization_config import read_quantization_config
from quire.models.stored_quantization.awq import AWQ
from quire.models.stored_quantization.compressed_tensors import CompressedTensors
from quire.models.stored_quantization.float8 import FLOAT8, FP8
from quire.models.stored_quantization.gptq import GPTQ
from quire.models.stored_quantization.mxfp4 import MXFP4
from quire.models.stored_quantization.scheme import TORCH_DTYPES, StoredQuantization
from quire.models.tensors.stored_tensor import StoredTensor

__all__ = ["FLOAT8", "TORCH_DTYPES", "StoredQuantization", "read_quantization"]

METHODS: Mapping[str, Callable[[HFConfig, Mapping[str, StoredTensor]], StoredQuantization]] = {
    "compressed-tensors": CompressedTensors,
    "awq": AWQ,
    "gptq": GPTQ,
    "mxfp4": MXFP4,
    "fp8": FP8,
}


def read_quantization(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> StoredQuantization | None:
    """Return the reader of a checkpoint's quantised weights; None if its configuration names no method."""
    quantization = read_quantization_config(config)
    return None if quantization is None else METHODS[quantization.method](quantization.fields, stored)
