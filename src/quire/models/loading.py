"""From a checkpoint to a decoder that runs."""

from __future__ import annotations

import torch

from quire.config import Quantization
from quire.models.checkpoint import Checkpoint
from quire.models.decoder import Decoder
from quire.models.families import build
from quire.models.weights import load_weights
from quire.ops import make_ops


def load_decoder(
    checkpoint: Checkpoint,
    *,
    device: str,
    dtype: torch.dtype,
    kernels: str = "auto",
    quantization: Quantization | None = None,
) -> Decoder:
    """Build the decoder that a checkpoint describes, and fill it.

    Args:
        checkpoint: the model's files.
        device: "cpu" or "cuda".
        dtype: of weights, hidden states and cache, as `choose_dtype` returns it.
        kernels, quantization: what computes, and on what weights; see `quire.ops.make_ops`.

    Raises:
        ConfigError: kernels or weights that cannot be had.
        UnsupportedModel: no family implements the architecture or one of its options.
        CheckpointError: a tensor or a field is missing or wrong.
    """
    spec, weight_map = build(checkpoint.config)
    place = torch.device(device)
    decoder = Decoder(spec, ops=make_ops(place, kernels, quantization), dtype=dtype, device=place)
    load_weights(checkpoint, weight_map, decoder, dtype=dtype)
    return decoder
