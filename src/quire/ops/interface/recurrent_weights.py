"""The weights of recurrent mixers between their projections, in the form that kernels take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SSMHeads(NamedTuple):
    """The learned parameters of the heads of a selective state space, [H] of float32 each.

    Args:
        A: decay rates, negative.
        dt_bias: added to a token's `dt` before the softplus.
        D: factor of a token's value that bypasses the state.
    """

    A: Tensor
    dt_bias: Tensor
    D: Tensor


class ShortConvWeights(NamedTuple):
    """The weights of a gated short convolution between its projections.

    Args:
        taps: [k, C] of float32, the tap of the row itself last.
        bias: [C] of float32, or None.
    """

    taps: Tensor
    bias: Tensor | None


class GatedDeltaNetWeights(NamedTuple):
    """The weights of a gated delta net between its projections, of float32.

    Args:
        taps: [k, C] of the convolution, the tap of the row itself last.
        A: [H], decay rates, negative.
        dt_bias: [H], added to a token's `dt` before the softplus.
        norm_scales: [V], of the norm of a head's output.
        norm_eps: added to the mean square there.
        num_key_heads: G.
        key_dim: K.
    """

    taps: Tensor
    A: Tensor
    dt_bias: Tensor
    norm_scales: Tensor
    norm_eps: float
    num_key_heads: int
    key_dim: int


class Mamba2Weights(NamedTuple):
    """The weights of a Mamba 2 mixer between its projections, of float32.

    Args:
        taps: [k, C] of the convolution, the tap of the row itself last.
        bias: [C], or None.
        heads: parameters of the heads.
        norm_scales: [G, H * D / G], of the norm of each group's gated output; None for no norm.
        norm_eps: added to the mean square there.
        written: G * N.
        gate_scale, dt_scale: factors of gates and of `dt`.
    """

    taps: Tensor
    bias: Tensor | None
    heads: SSMHeads
    norm_scales: Tensor | None
    norm_eps: float
    written: int
    gate_scale: float
    dt_scale: float
