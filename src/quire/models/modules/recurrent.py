"""The blocks that carry a state from token to token. They know shapes and numbers, no family."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.modules.blocks import SelectedRows
from quire.models.modules.norms import scale_slot
from quire.models.modules.projections import Projection, ResidualAdd, ResidualProjection
from quire.models.modules.weight_slots import WeightSlot, WeightSlots, nested, reordered
from quire.models.specs import spec
from quire.ops.interface.fused_layers import PackedRecurrence
from quire.ops.interface.ops import Ops, StepStates
from quire.ops.interface.recurrent_weights import GatedDeltaNetWeights, Mamba2Weights, ShortConvWeights, SSMHeads


class Convolution:
    """The weights of a short convolution over a sequence, each channel by itself.

    Attributes:
        taps: [k, C] of float32.
        bias: [C] of float32, or None.
        slots: "weight" and, if there is one, "bias".
    """

    __slots__ = ("bias", "slots", "taps")

    def __init__(
        self, num_channels: int, kernel: int, has_bias: bool, device: torch.device, scales: Tensor | float = 1.0
    ) -> None:
        taps = self.taps = torch.empty(kernel, num_channels, device=device)
        self.bias = torch.empty(num_channels, device=device) if has_bias else None
        self.slots: WeightSlots = {
            "weight": WeightSlot((num_channels, 1, kernel), lambda weight: taps.copy_(weight.squeeze(1).T).mul_(scales))
        }
        if self.bias is not None:
            self.slots["bias"] = WeightSlot((num_channels,), self.bias.copy_)


class ShortConvBlock:
    """Gated short convolution over paged states."""

    def __init__(
        self, conv: spec.ShortConv, width: int, layer_idx: int, addition: ResidualAdd, ops: Ops, device: torch.device
    ) -> None:
        self._layer_idx = layer_idx
        self._input = Projection(width, 3 * conv.num_channels, conv.bias, ops)
        convolution = Convolution(conv.num_channels, conv.kernel, conv.bias, device)
        self._weights = ShortConvWeights(convolution.taps, convolution.bias)
        self._output = ResidualProjection(conv.num_channels, width, conv.bias, addition, ops)
        self.slots = nested(input=self._input.slots, conv=convolution.slots, output=self._output.slots)

    @property
    def packed(self) -> PackedRecurrence | None:
        """Weights for the fused kernels; None if the block has parts that they lack."""
        return _packed(self._input, self._output, self._weights)

    def __call__(self, x: Tensor, residual: Tensor, step: StepStates, selected: SelectedRows | None = None) -> Tensor:
        """Add the block's output for `x` [T, E] to `residual` [T, E]; the sequences' states are updated."""
        y = step.short_conv(self._layer_idx, self._input.run(x), self._weights)
        return _add(self._output, y, residual, selected)


class Mamba2Block:
    """A selective state space over paged states.

    ```
     x -> input -> | gates | values, B, C | dt |
                        |     conv, silu -> ssm_scan <-'
                        '--------------------> gate, norm -> output
    ```
    """

    packed = None

    def __init__(
        self, mamba: spec.Mamba2, width: int, layer_idx: int, addition: ResidualAdd, ops: Ops, device: torch.device
    ) -> None:
        num_heads, inner, written = mamba.num_heads, mamba.inner, mamba.num_groups * mamba.state_dim
        self._layer_idx = layer_idx
        gate_scale, *conv_scales, dt_scale = mamba.scales
        num_inputs = inner + mamba.num_channels + num_heads
        self._input = Projection(width, num_inputs, mamba.input_bias, ops, min_bits=8)
        scales = torch.tensor(conv_scales).repeat_interleave(torch.tensor((inner, written, written))).to(device)
        conv = Convolution(mamba.num_channels, mamba.kernel, mamba.conv_bias, device, scales)
        heads = SSMHeads(*torch.empty(3, num_heads, device=device))
        self._output = ResidualProjection(inner, width, mamba.output_bias, addition, ops)
        self.slots = nested(input=self._input.slots, conv=conv.slots, output=self._output.slots)
        self.slots["A_log"] = WeightSlot((num_heads,), lambda weight: heads.A.copy_(weight).exp_().neg_())
        self.slots["dt_bias"] = WeightSlot((num_heads,), heads.dt_bias.copy_)
        self.slots["D"] = WeightSlot((num_heads,), heads.D.copy_)
        norm_scales, norm_eps = None, 0.0
        if mamba.norm is not None:
            norm_eps = mamba.norm.eps
            scale = norm_scales = torch.empty(mamba.num_groups, inner // mamba.num_groups, device=device)
            self.slots["norm.weight"] = WeightSlot((inner,), lambda weight: scale.copy_(weight.view_as(scale)))
        self._weights = Mamba2Weights(conv.taps, conv.bias, heads, norm_scales, norm_eps, written, gate_scale, dt_scale)

    def __call__(self, x: Tensor, residual: Tensor, step: StepStates, selected: SelectedRows | None = None) -> Tensor:
        """Add the block's output for `x` [T, E] to `residual` [T, E]; the sequences' states are updated."""
        y = step.mamba2(self._layer_idx, self._input.run(x), self._weights)
        return _add(self._output, y, residual, selected)


class GatedDeltaNetBlock:
    """The gated delta rule over paged states.

    ```
     x -> input -> | q, k, v | gates | beta | dt |
                     conv, silu -> gated_delta_rule <-'------'
                                      '-> norm --> gate -> output
    ```
    """

    def __init__(
        self, net: spec.GatedDeltaNet, width: int, layer_idx: int, addition: ResidualAdd, ops: Ops, device: torch.device
    ) -> None:
        num_heads = net.num_value_heads
        self._layer_idx = layer_idx
        self._input = Projection(width, net.num_channels + net.inner + 2 * num_heads, False, ops, min_bits=8)
        conv = Convolution(net.num_channels, net.kernel, False, device)
        A, dt_bias = torch.empty(2, num_heads, device=device)
        scale = torch.empty(net.value_dim, device=device)
        self._weights = GatedDeltaNetWeights(conv.taps, A, dt_bias, scale, net.norm.eps, net.num_key_heads, net.key_dim)
        self._output = ResidualProjection(net.inner, width, False, addition, ops)
        self.slots = nested(input=self._input.slots, conv=conv.slots, output=self._output.slots)
        if net.by_key_head:
            self.slots["input.weight"] = reordered(self.slots["input.weight"], _rows_of_key_heads(net))
        self.slots["A_log"] = WeightSlot((num_heads,), lambda weight: A.copy_(weight).exp_().neg_())
        self.slots["dt_bias"] = WeightSlot((num_heads,), dt_bias.copy_)
        self.slots["norm.weight"] = scale_slot(net.norm, scale, (net.value_dim,))

    @property
    def packed(self) -> PackedRecurrence | None:
        """Weights for the fused kernels; None if the block has parts that they lack."""
        return _packed(self._input, self._output, self._weights)

    def __call__(self, x: Tensor, residual: Tensor, step: StepStates, selected: SelectedRows | None = None) -> Tensor:
        """Add the block's output for `x` [T, E] to `residual` [T, E]; the sequences' states are updated."""
        y = step.gated_delta_net(self._layer_idx, self._input.run(x), self._weights)
        return _add(self._output, y, residual, selected)


def _rows_of_key_heads(net: spec.GatedDeltaNet) -> Tensor:
    """Return the stored row of each output of the input projection; see `GatedDeltaNet.by_key_head`."""
    per_head = net.num_value_heads // net.num_key_heads
    values = per_head * net.value_dim
    num_first, num_second = net.num_key_heads * 2 * (net.key_dim + values), 2 * net.num_value_heads
    ends = net.key_dim, 2 * net.key_dim, 2 * net.key_dim + values
    first = torch.arange(num_first).view(net.num_key_heads, -1).tensor_split(ends, 1)
    second = torch.arange(num_first, num_first + num_second).view(net.num_key_heads, -1).chunk(2, 1)
    return torch.cat([part.flatten() for part in (*first, *second)])


def _packed(
    projection: Projection, output: ResidualProjection, weights: ShortConvWeights | GatedDeltaNetWeights
) -> PackedRecurrence | None:
    plain = output.plain
    return None if plain is None else PackedRecurrence(projection.run, plain, weights)


def _add(output: ResidualProjection, y: Tensor, residual: Tensor, selected: SelectedRows | None) -> Tensor:
    """Add the projection of `y`, or of its selected rows, to `residual`."""
    if selected is not None:
        if not len(residual):
            return residual
        y = y.index_select(0, selected.rows)
    return output(y, residual)
