"""Loading of the vision encoder of a checkpoint, beside its decoder."""

from __future__ import annotations

import torch

from quire.config import Quantization
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families.quantization_config import without_quantization
from quire.models.families.vision_towers import build_vision
from quire.models.loading.sizes import check_sizes
from quire.models.loading.weights import load_weights
from quire.models.modules.vision_encoder import VisionEncoder
from quire.ops import make_ops


def load_vision_encoder(
    checkpoint: Checkpoint,
    *,
    device: str,
    dtype: torch.dtype,
    kernels: str,
    quantization: Quantization | None,
    weight_packing: str,
) -> VisionEncoder:
    """Build the vision encoder of files that have one (`find_vision`), and load its weights; see `load_decoder`.

    Raises:
        UnsupportedModel: an option of the encoder is not implemented.
        CheckpointError: a tensor or a field is missing or wrong.
    """
    built = build_vision(without_quantization(checkpoint.config), checkpoint.tensors)
    assert built is not None, "the checkpoint has no vision encoder"
    spec, weight_map = built
    check_sizes(spec, checkpoint.tensors)
    ops = make_ops(torch.device(device), kernels, quantization, weight_packing)
    encoder = VisionEncoder(spec, ops=ops, dtype=dtype, device=torch.device(device))
    load_weights(checkpoint, weight_map, encoder)
    return encoder
