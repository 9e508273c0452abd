"""Alternating updates (AltUp): several hidden states of each token, of which a layer computes the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire.models.modules.norms import Norm
from quire.models.modules.per_layer_inputs import PerLayerGate
from quire.models.modules.projections import Projection
from quire.models.modules.weight_slots import WeightSlot, WeightSlots, nested
from quire.models.specs.spec import AltUp
from quire.ops.interface.ops import Ops

# Least mean square of a projected hidden state that is brought to the magnitude of another.
LEAST_SQUARE = 1e-5


class AltUpEnds:
    """The hidden states of a token, made of its embedding, and the one that is made of them after the last layer.

    Args:
        alt_up: number of hidden states.
        width: E.

    Attributes:
        slots: "begin.0.weight" to "end.{N - 2}.weight".
    """

    def __init__(self, alt_up: AltUp, width: int, ops: Ops) -> None:
        self._begin, self._end = (
            [Projection(width, width, False, ops) for _ in range(alt_up.num_streams - 1)] for _ in range(2)
        )
        self.slots: WeightSlots = {}
        for name, projections in (("begin", self._begin), ("end", self._end)):
            for idx, projection in enumerate(projections):
                self.slots |= nested(**{f"{name}.{idx}": projection.slots})

    def begin(self, x: Tensor) -> Tensor:
        """Return hidden states [T, N, E]: `x` [T, E], and projections of it with its magnitude."""
        return torch.stack([x, *_projected(self._begin, [x] * len(self._begin), x)], 1)

    def end(self, streams: Tensor) -> Tensor:
        """Return the mean [T, E] of the first hidden state, and of projections of the others with its magnitude."""
        first, *others = streams.unbind(1)
        return torch.stack([first, *_projected(self._end, others, first)]).mean(0)


def _projected(projections: Sequence[Projection], inputs: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return projections of inputs [T, E], each row with the root mean square of a row of `like` [T, E]."""
    magnitude = like.square().mean(-1, keepdim=True).sqrt_()
    products = (projection.run(each) for projection, each in zip(projections, inputs, strict=True))
    return [
        product * magnitude / product.square().mean(-1, keepdim=True).clamp_(min=LEAST_SQUARE).sqrt_()
        for product in products
    ]


class AltUpBlock:
    """The update of all hidden states around a layer that computes the first, and its low-rank branch (LAuReL).

    Args:
        alt_up: sizes.
        width: E.
        gate: addition of the layer's own inputs, to all hidden states but the first.
        dtype: dtype of hidden states.

    Attributes:
        slots: names of the weights: "predict", "correct", "router", "router_norm", "left", "right", "low_rank_norm",
            and "output_scale" if there is one.
    """

    def __init__(
        self,
        alt_up: AltUp,
        width: int,
        gate: PerLayerGate,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        count = alt_up.num_streams
        self._num_streams, self._width, self._gate = count, width, gate
        self._router_norm, self._low_rank_norm = (Norm(alt_up.norm, width, ops, dtype, device) for _ in range(2))
        self._left = Projection(width, alt_up.low_rank, False, ops)
        self._right = Projection(alt_up.low_rank, width, False, ops)
        # Small matrices whose products are read by all hidden states: they are never quantised.
        shapes = {"predict": (count**2, count), "correct": (count, count), "router": (count, width)}
        self._matrices = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        self.slots = nested(
            left=self._left.slots,
            right=self._right.slots,
            router_norm=self._router_norm.slots,
            low_rank_norm=self._low_rank_norm.slots,
        )
        for name, matrix in self._matrices.items():
            self.slots[f"{name}.weight"] = WeightSlot(shapes[name], matrix.copy_)
        self._output_scale: Tensor | None = None
        if alt_up.has_output_scale:
            self._output_scale = torch.ones(width, dtype=dtype, device=device)
            self.slots["output_scale.weight"] = WeightSlot((width,), self._output_scale.copy_)

    def predict(self, streams: Tensor) -> Tensor:
        """Return predictions of all hidden states [T, N, E] after the layer; it computes with the first of them."""
        coefficients = functional.linear(self._routed(streams[:, 0]), self._matrices["predict"])
        return torch.baddbmm(streams, coefficients.view(-1, self._num_streams, self._num_streams), streams)

    def with_low_rank(self, normed: Tensor, x: Tensor) -> Tensor:
        """Return what the mixer's output is added to: `x + normed + norm(right(left(normed)))`, all [T, E]."""
        return x + normed + self._low_rank_norm(self._right.run(self._left.run(normed)))

    @staticmethod
    def halved(x: Tensor) -> Tensor:
        """Return the sum of two branches [T, E] with the magnitude of one."""
        return x * math.sqrt(0.5)

    def correct(self, predicted: Tensor, x: Tensor, layer_inputs: Tensor) -> Tensor:
        """Return all hidden states [T, N, E], by what the layer computed and by its own inputs.

        Args:
            predicted: predictions, [T, N, E].
            x: the first hidden state after the layer, [T, E].
            layer_inputs: [T, P].
        """
        coefficients = functional.linear(self._routed(x), self._matrices["correct"]) + 1.0
        corrected = torch.addcmul(predicted, coefficients[:, :, None], (x - predicted[:, 0])[:, None])
        first = corrected[:, 0]
        if self._output_scale is not None:
            first = first * self._output_scale
        corrected[:, 1:] += self._gate(first, layer_inputs, torch.zeros_like(first))[:, None]
        return corrected

    def _routed(self, x: Tensor) -> Tensor:
        """Return a number of each hidden state, [T, N], between -1 and 1."""
        product = functional.linear(self._router_norm(x) / self._width, self._matrices["router"])
        return product.float().tanh_().to(x.dtype)
