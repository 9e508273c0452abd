"""Reader of the unquantised tensors of a checkpoint that is to be quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import ConfigError, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.finite_values import check_finite
from quire.models.checkpoints.tensor_reader import TensorReader


class PlainTensors:
    """Reads tensors of 16 and 32 bits, one at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.reader = TensorReader(checkpoint)
        for name in checkpoint.tensors:
            self.reader.shape(name, "a copy")

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a copy of a tensor."""
        tensor = self.reader.read(name)
        assert isinstance(tensor, Tensor)
        check_finite(self._checkpoint, name, tensor)
        if dtype == torch.float16 and tensor.dtype != dtype and bool((tensor.abs() > torch.finfo(dtype).max).any()):
            raise ConfigError(f"tensor {shown(name)} has values that float16 cannot hold", field="dtype")
        copied = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
        self.reader.let_go([name])
        return copied
