"""The check that the values of stored tensors are finite."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from quire.errors import CheckpointError, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.tensors.layer_weight import LayerWeight

# Size of the sample of a tensor's values that is checked.
SAMPLED = 4096
# A NaN in a row of an embedding fails only requests with its token; some checkpoints have such rows for unused tokens.
MOST_BROKEN_ROWS = 0.5


def place_of(checkpoint: Checkpoint, name: str) -> Path:
    """Return the file of a tensor, or the folder if it is stored as several tensors."""
    stored = checkpoint.tensors.get(name)
    return checkpoint.folder if stored is None else stored.path


def check_finite(checkpoint: Checkpoint, name: str, tensor: Tensor | LayerWeight, *, most: float = 0.0) -> None:
    """Refuse a tensor with infinite values or NaN, on which every request would fail.

    Only a sample is checked, at almost no cost; a single value may be missed.

    Args:
        checkpoint: the model's files.
        name: name of the tensor.
        tensor: its values.
        most: share of the sample that may be infinite or NaN.

    Raises:
        CheckpointError: the share is larger.
    """
    if isinstance(tensor, LayerWeight):
        num_rows, width = tensor.weight.shape
        step, blocks = max(1, num_rows * width // SAMPLED), tensor.weight.blocks
        if blocks is not None and bool(blocks.factors_of(step).isfinite().all()):
            return  # codes of blocks are always finite
        tensor = tensor.weight.dequantize(slice(0, num_rows, step))
    # An odd step visits all columns of a matrix, because their number is usually even.
    sample = tensor.flatten()[:: max(1, tensor.numel() // SAMPLED) | 1]
    if int(sample.isfinite().sum()) < (1 - most) * sample.numel():
        count = tensor.numel() - int(tensor.isfinite().sum())
        raise CheckpointError(
            f"{place_of(checkpoint, name)} holds tensor {shown(name)} with {count:,} of {tensor.numel():,} values "
            "that are infinite or no numbers"
        )
