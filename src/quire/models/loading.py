"""From a checkpoint to a decoder that runs."""

from __future__ import annotations

import torch

from quire.errors import ConfigError
from quire.models.checkpoint import Checkpoint
from quire.models.decoder import Decoder
from quire.models.families import build
from quire.models.weights import load_weights
from quire.ops import make_ops


def load_decoder(
    checkpoint: Checkpoint, *, device: str, dtype: torch.dtype, kernels: str = "auto", weight_packing: str = "auto"
) -> Decoder:
    """Build the decoder that a checkpoint describes, and fill it.

    Args:
        checkpoint: the model's files.
        device: "cpu" or "cuda".
        dtype: of weights, hidden states and cache, as `choose_dtype` returns it.
        kernels: what computes; see `quire.ops.make_ops`.
        weight_packing: how weights lie; see there.

    Raises:
        ConfigError: kernels or a packing that cannot be had.
        UnsupportedModel: no family implements the architecture or one of its options.
        CheckpointError: a tensor or a field is missing or wrong.
    """
    if weight_packing == "lossless" and dtype != torch.bfloat16:
        raise ConfigError(
            f"weight_packing 'lossless' is for dtype bfloat16, and weights are of {str(dtype).removeprefix('torch.')}; "
            "use 'plain', or dtype 'bfloat16'",
            field="weight_packing",
        )
    spec, weight_map = build(checkpoint.config)
    place = torch.device(device)
    decoder = Decoder(spec, ops=make_ops(place, kernels, weight_packing), dtype=dtype, device=place)
    load_weights(checkpoint, weight_map, decoder, dtype=dtype)
    return decoder
