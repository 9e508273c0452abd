"""The blocks that carry a state from token to token. They know shapes and numbers, no family."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.models import spec
from quire.models.blocks import SelectedRows
from quire.models.norms import scale_slot
from quire.models.projections import Projection, ResidualAdd, ResidualProjection
from quire.models.weight_slots import WeightSlot, WeightSlots, nested
from quire.ops.interface import Ops, SSMHeads, StepStates

# Added to the squared length of queries and keys before they are divided by it.
LENGTH_EPS = 1e-6


class Convolution:
    """A short convolution over a sequence, each channel by itself.

    Args:
        num_channels: C.
        kernel: k.
        scales: factors of the inputs, [C] of float32 or one for all; the taps include them, so that nothing is rounded.

    Attributes:
        slots: "weight" and, if there is one, "bias".
    """

    __slots__ = ("_bias", "_taps", "slots")

    def __init__(
        self, num_channels: int, kernel: int, has_bias: bool, device: torch.device, scales: Tensor | float = 1.0
    ) -> None:
        taps = self._taps = torch.empty(kernel, num_channels, device=device)
        self._bias = torch.empty(num_channels, device=device) if has_bias else None
        self.slots: WeightSlots = {
            "weight": WeightSlot((num_channels, 1, kernel), lambda weight: taps.copy_(weight.squeeze(1).T).mul_(scales))
        }
        if self._bias is not None:
            self.slots["bias"] = WeightSlot((num_channels,), self._bias.copy_)

    def __call__(self, x: Tensor, step: StepStates, layer_idx: int, activation: bool = False) -> Tensor:
        """Convolve [T, C]; `activation` sends the result through silu."""
        return step.causal_conv(layer_idx, x, self._taps, self._bias, activation)


class ShortConvBlock:
    """Gated short convolution over paged states.

    Args:
        conv: its channels and kernel.
        width: E.
        layer_idx: the layer's place in its cache group.
        addition: addition of the result to the residual.

    Attributes:
        slots: "input" (b, c and x), "conv" and "output".
    """

    def __init__(
        self, conv: spec.ShortConv, width: int, layer_idx: int, addition: ResidualAdd, ops: Ops, device: torch.device
    ) -> None:
        self._layer_idx = layer_idx
        self._input = Projection(width, 3 * conv.num_channels, conv.bias, ops)
        self._conv = Convolution(conv.num_channels, conv.kernel, conv.bias, device)
        self._output = ResidualProjection(conv.num_channels, width, conv.bias, addition, ops)
        self.slots = nested(input=self._input.slots, conv=self._conv.slots, output=self._output.slots)

    def __call__(self, x: Tensor, residual: Tensor, step: StepStates, picked: SelectedRows | None = None) -> Tensor:
        """Add to `residual` [T, E] what the block makes of `x` [T, E]; the states of the rows' sequences go on."""
        b, c, values = self._input.run(x).chunk(3, -1)
        y = self._conv(b * values, step, self._layer_idx)
        if picked is not None:
            if not len(residual):
                return residual
            y, c = _rows_of(picked, y, c)
        return self._output(y.mul_(c), residual)


class Mamba2Block:
    """A selective state space over paged states.

    ```
     x -> input -> | gates | values, B, C | dt |
                        |     conv, silu -> ssm_scan <-'
                        '--------------------> gate, norm -> output
    ```

    Args:
        mamba: heads, groups, and what is done to them.
        width: E.
        layer_idx: the layer's place in its cache group.
        addition: addition of the result to the residual.

    Attributes:
        slots: "input", "conv", "A_log", "dt_bias", "D", "output" and, if there is one, "norm".
    """

    def __init__(
        self, mamba: spec.Mamba2, width: int, layer_idx: int, addition: ResidualAdd, ops: Ops, device: torch.device
    ) -> None:
        num_heads, inner, written = mamba.num_heads, mamba.inner, mamba.num_groups * mamba.state_dim
        self._layer_idx = layer_idx
        self._gated_norm = ops.gated_norm
        self._norm = mamba.norm
        self._gate_scale, *conv_scales, self._dt_scale = mamba.scales
        self._parts = (inner, mamba.num_channels, num_heads)
        self._conv_parts = (inner, written, written)
        self._input = Projection(width, sum(self._parts), mamba.input_bias, ops, min_bits=8)
        scales = torch.tensor(conv_scales).repeat_interleave(torch.tensor(self._conv_parts)).to(device)
        self._conv = Convolution(mamba.num_channels, mamba.kernel, mamba.conv_bias, device, scales)
        heads = self._heads = SSMHeads(*torch.empty(3, num_heads, device=device))
        self._output = ResidualProjection(inner, width, mamba.output_bias, addition, ops)
        self.slots = nested(input=self._input.slots, conv=self._conv.slots, output=self._output.slots)
        self.slots["A_log"] = WeightSlot((num_heads,), lambda weight: heads.A.copy_(weight).exp_().neg_())
        self.slots["dt_bias"] = WeightSlot((num_heads,), heads.dt_bias.copy_)
        self.slots["D"] = WeightSlot((num_heads,), heads.D.copy_)
        if self._norm is not None:
            scale = self._scale = torch.empty(mamba.num_groups, inner // mamba.num_groups, device=device)
            self.slots["norm.weight"] = WeightSlot((inner,), lambda weight: scale.copy_(weight.view_as(scale)))

    def __call__(self, x: Tensor, residual: Tensor, step: StepStates, picked: SelectedRows | None = None) -> Tensor:
        """Add to `residual` [T, E] what the block makes of `x` [T, E]; the states of the rows' sequences go on."""
        gates, conv_inputs, dt = self._input.run(x).split_with_sizes(self._parts, 1)
        if self._dt_scale != 1.0:
            dt = dt.float() * self._dt_scale
        convolved = self._conv(conv_inputs, step, self._layer_idx, activation=True)
        values, B, C = convolved.split_with_sizes(self._conv_parts, 1)
        y = step.ssm_scan(self._layer_idx, values, B, C, dt, self._heads)
        if picked is not None:
            if not len(residual):
                return residual
            y, gates = _rows_of(picked, y, gates)
        return self._output(self._gate(y, gates).to(x.dtype), residual)

    def _gate(self, y: Tensor, gates: Tensor) -> Tensor:
        """Gate what the heads give [T, H * D], and norm it; where gates are scaled, in float32."""
        if self._gate_scale != 1.0:
            gates = gates.float() * self._gate_scale
        if self._norm is None:
            return functional.silu(gates.float()).mul_(y)
        return self._gated_norm(y, gates, self._scale, self._norm.eps)


class GatedDeltaNetBlock:
    """The gated delta rule over paged states.

    ```
     x -> input -> | q, k, v | gates | beta | dt |
                     conv, silu -> gated_delta_rule <-'------'
                                      '-> norm --> gate -> output
    ```

    Args:
        net: heads, and what is done to them.
        width: E.
        layer_idx: the layer's place in its cache group.
        addition: addition of the result to the residual.

    Attributes:
        slots: "input", "conv", "A_log", "dt_bias", "norm" and "output".
    """

    def __init__(
        self, net: spec.GatedDeltaNet, width: int, layer_idx: int, addition: ResidualAdd, ops: Ops, device: torch.device
    ) -> None:
        num_heads = net.num_value_heads
        self._layer_idx = layer_idx
        self._net = net
        self._rms_norm = ops.rms_norm
        self._parts = (net.num_channels, net.inner, num_heads, num_heads)
        self._conv_parts = (net.num_channels - net.inner, net.inner)
        self._input = Projection(width, sum(self._parts), False, ops, min_bits=8)
        self._conv = Convolution(net.num_channels, net.kernel, False, device)
        A, dt_bias = self._A, self._dt_bias = torch.empty(2, num_heads, device=device)
        # A length of 1 is a root mean square of K ** -0.5.
        self._unit = torch.full((net.key_dim,), net.key_dim**-0.5, device=device)
        self._scale = torch.empty(net.value_dim, device=device)
        self._output = ResidualProjection(net.inner, width, False, addition, ops)
        self.slots = nested(input=self._input.slots, conv=self._conv.slots, output=self._output.slots)
        self.slots["A_log"] = WeightSlot((num_heads,), lambda weight: A.copy_(weight).exp_().neg_())
        self.slots["dt_bias"] = WeightSlot((num_heads,), dt_bias.copy_)
        self.slots["norm.weight"] = scale_slot(net.norm, self._scale, (net.value_dim,))

    def __call__(self, x: Tensor, residual: Tensor, step: StepStates, picked: SelectedRows | None = None) -> Tensor:
        """Add to `residual` [T, E] what the block makes of `x` [T, E]; the states of the rows' sequences go on."""
        num_rows, key_dim = len(x), self._net.key_dim
        conv_inputs, gates, beta, dt = self._input.run(x).split_with_sizes(self._parts, 1)
        convolved = self._conv(conv_inputs, step, self._layer_idx, activation=True)
        pairs, values = convolved.split_with_sizes(self._conv_parts, 1)
        pairs = self._rms_norm(pairs.float().reshape(-1, key_dim), self._unit, LENGTH_EPS / key_dim)
        q, k = pairs.view(num_rows, 2, -1).unbind(1)
        g = functional.softplus(dt.float() + self._dt_bias) * self._A
        y = step.gated_delta_rule(self._layer_idx, q * key_dim**-0.5, k, values, g, beta.float().sigmoid())
        if picked is not None:
            if not len(residual):
                return residual
            y, gates = _rows_of(picked, y, gates)
        normed = self._rms_norm(y.view(-1, self._net.value_dim), self._scale, self._net.norm.eps).view_as(y)
        return self._output(functional.silu(gates.float()).mul_(normed).to(x.dtype), residual)


def _rows_of(picked: SelectedRows, *parts: Tensor) -> list[Tensor]:
    return [part.index_select(0, picked.rows) for part in parts]
