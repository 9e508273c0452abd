"""Recurrent mixers between their projections, over a recurrence: by torch operators, or the slow twin."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from quire.ops.interface.ops import Ops
from quire.ops.interface.recurrent_weights import GatedDeltaNetWeights, Mamba2Weights, ShortConvWeights, SSMHeads

# Added to the squared length of queries and keys before they are normalised.
LENGTH_EPS = 1e-6


class Recurrence(Protocol):
    """The operations of recurrent mixers over the states of one cache group, in one step."""

    def causal_conv(
        self, layer_idx: int, x: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, activation: bool
    ) -> Tensor:
        """Convolve each channel of the rows with the inputs before them, and store the last inputs.

        Args:
            x: [T, C].
            conv_weight: [k, C] of float32, the tap of the row itself last.
            conv_bias: [C] of float32.
            activation: True to apply silu to the sum.

        Returns:
            [T, C], contiguous, of the dtype of `x`; summed in float32, rounded once.
        """

    def ssm_scan(self, layer_idx: int, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, heads: SSMHeads) -> Tensor:
        """Update each sequence's state with its rows, and read from it: a selective state space.

        For each head, with `dt = softplus(dt + dt_bias)` and the state S [D, N]:

            S = exp(dt * A) * S + dt * outer(x, B)
            y = S @ C + D * x

        Args:
            x: [T, H * D].
            B, C: [T, G * N]; heads `[g * H / G, (g + 1) * H / G)` share group `g`.
            dt: [T, H].
            heads: parameters of the layer.

        Returns:
            [T, H * D] of float32, contiguous.

        Source: Mamba 2, arXiv 2405.21060.
        """

    def gated_delta_rule(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Update each sequence's state with its rows, and read from it: the gated delta rule.

        For each head, with the state S [K, V]:

            S = exp(g) * S
            S = S + outer(k, beta * (v - k @ S))
            y = q @ S

        Args:
            q, k: [T, G * K] of float32, keys of length 1 at most; heads `[g * H / G, (g + 1) * H / G)` share group `g`.
            v: [T, H * V].
            g: [T, H] of float32, logarithms of the decay.
            beta: [T, H] of float32, from 0 to 1: rate of the correction.

        Returns:
            [T, H * V] of float32, contiguous.

        Source: Gated Delta Networks, arXiv 2412.06464.
        """


class RecurrentMixers:
    """The methods of `StepStates` by operators."""

    def __init__(self, recurrence: Recurrence, ops: Ops) -> None:
        self._recurrence, self._ops = recurrence, ops

    def short_conv(self, layer_idx: int, projected: Tensor, weights: ShortConvWeights) -> Tensor:
        """Multiply, convolve, multiply."""
        b, c, values = projected.chunk(3, -1)
        return self._recurrence.causal_conv(layer_idx, b * values, *weights, False).mul_(c)

    def gated_delta_net(self, layer_idx: int, projected: Tensor, weights: GatedDeltaNetWeights) -> Tensor:
        """Norm queries and keys after the convolution, and outputs before the gates."""
        num_heads, num_rows, key_dim = len(weights.A), len(projected), weights.key_dim
        num_keys, inner = weights.num_key_heads * key_dim, num_heads * len(weights.norm_scales)
        conv_parts = (2 * num_keys, inner)
        conv_inputs, gates, beta, dt = projected.split_with_sizes((sum(conv_parts), inner, num_heads, num_heads), 1)
        convolved = self._recurrence.causal_conv(layer_idx, conv_inputs, weights.taps, None, True)
        pairs, values = convolved.split_with_sizes(conv_parts, 1)
        # A length of 1 is a root mean square of K ** -0.5.
        unit = weights.taps.new_full((key_dim,), key_dim**-0.5)
        pairs = self._ops.rms_norm(pairs.float().reshape(-1, key_dim), unit, LENGTH_EPS / key_dim)
        q, k = pairs.view(num_rows, 2, -1).unbind(1)
        g = functional.softplus(dt.float() + weights.dt_bias) * weights.A
        rates = beta.float().sigmoid()
        y = self._recurrence.gated_delta_rule(layer_idx, q * key_dim**-0.5, k, values, g, rates)
        heads = y.view(-1, len(weights.norm_scales))
        normed = self._ops.rms_norm(heads, weights.norm_scales, weights.norm_eps).view_as(y)
        return functional.silu(gates.float()).mul_(normed).to(projected.dtype)

    def mamba2(self, layer_idx: int, projected: Tensor, weights: Mamba2Weights) -> Tensor:
        """Scale gates and `dt` in float32."""
        num_heads, num_channels = len(weights.heads.A), weights.taps.shape[1]
        inner = num_channels - 2 * weights.written
        gates, conv_inputs, dt = projected.split_with_sizes((inner, num_channels, num_heads), 1)
        if weights.dt_scale != 1.0:
            dt = dt.float() * weights.dt_scale
        convolved = self._recurrence.causal_conv(layer_idx, conv_inputs, weights.taps, weights.bias, True)
        x, B, C = convolved.split_with_sizes((inner, weights.written, weights.written), 1)
        y = self._recurrence.ssm_scan(layer_idx, x, B, C, dt, weights.heads)
        if weights.gate_scale != 1.0:
            gates = gates.float() * weights.gate_scale
        if weights.norm_scales is None:
            y = functional.silu(gates.float()).mul_(y)
        else:
            y = self._ops.gated_norm(y, gates, weights.norm_scales, weights.norm_eps)
        return y.to(projected.dtype)
