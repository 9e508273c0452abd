"""The layers over pooled hidden states: the head that classifies, and dense layers of embeddings."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quire.models.modules.norms import make_norm
from quire.models.modules.projections import Projection
from quire.models.modules.weight_slots import nested
from quire.models.specs.pooled_spec import ClassifierHead, Dense
from quire.ops.interface.ops import Ops

# They are small, and few rows pass through them: with fewer bits, results would change for no gain.
MIN_BITS: Final = 8


class PooledHeads:
    """The layers of a model over pooled hidden states.

    Args:
        classifier: head that classifies; None without one.
        dense: layers whose result is an embedding; empty if pooled states are embeddings.
        width: E.
    """

    def __init__(
        self,
        classifier: ClassifierHead | None,
        dense: tuple[Dense, ...],
        width: int,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.classifier = classifier
        self._dtype = dtype
        widths = [width, *(layer.width for layer in dense)]
        self._dense = [_DenseLayer(layer, inputs, ops) for layer, inputs in zip(dense, widths, strict=False)]
        self.slots = nested(**{f"dense.{idx}": layer.slots for idx, layer in enumerate(self._dense)})
        if classifier is not None:
            inner = classifier.dense
            self._inner = None if inner is None else _DenseLayer(inner, width, ops)
            out_width = width if inner is None else inner.width
            self._norm = make_norm(classifier.norm, out_width, ops, dtype, device)
            self._output = Projection(out_width, len(classifier.labels), classifier.bias, ops, min_bits=MIN_BITS)
            parts = {"norm": self._norm.slots, "output": self._output.slots}
            parts |= {} if self._inner is None else {"dense": self._inner.slots}
            self.slots |= nested(classifier=nested(**parts))

    def embeddings(self, pooled: Tensor) -> Tensor:
        """Return the embeddings [S, D], float32, of pooled hidden states [S, E]."""
        for layer in self._dense:
            pooled = layer(pooled.to(self._dtype))
        return pooled.float()

    def logits(self, pooled: Tensor) -> Tensor:
        """Return the logits of the classes, [S, C] of float32, of pooled hidden states [S, E]."""
        assert self.classifier is not None, "the model has no head that classifies"
        x = pooled.to(self._dtype)
        if self._inner is not None:
            x = self._inner(x)
        return self._output.run(self._norm(x)).float()


class _DenseLayer:
    """A linear layer and an activation."""

    def __init__(self, layer: Dense, width: int, ops: Ops) -> None:
        self._activation, self._activate = layer.activation, ops.activate
        self._linear = Projection(width, layer.width, layer.bias, ops, min_bits=MIN_BITS)
        self.slots = self._linear.slots

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [S, D] of inputs [S, E]."""
        x = self._linear.run(x)
        return x if self._activation is None else self._activate(x, self._activation)
