"""Recurrent mixers as values, and the shape of their states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from quire.models.specs.norm_spec import RMSNorm


class StateCacheShape(NamedTuple):
    """The state of a sequence in a recurrent layer; layers with equal shapes are one cache group.

    Args:
        num_columns, num_channels: shape of the last inputs of the convolution, in the model's dtype.
        sums: shape of the matrices that accumulate over all tokens, float32; zeros for none.
    """

    num_columns: int
    num_channels: int
    sums: tuple[int, int, int] = (0, 0, 0)

    @property
    def num_inputs(self) -> int:
        """Number of values in the last inputs."""
        return self.num_columns * self.num_channels

    @property
    def sum_bytes(self) -> int:
        """Bytes of the accumulated matrices."""
        return 4 * math.prod(self.sums)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Gated short convolution: `output(c * convolution(b * x))`, of three projections `b, c, x`.

    Args:
        num_channels: channels of the convolution, which is depthwise.
        kernel: tokens under the convolution, including the current one.
        bias: whether the convolution and the projections add a learned bias.

    Source: LFM2 technical report, arXiv 2511.23404.
    """

    num_channels: int
    kernel: int
    bias: bool = False

    @property
    def cache(self) -> StateCacheShape:
        """Cache of a layer: the last inputs of its convolution."""
        return StateCacheShape(self.kernel - 1, self.num_channels)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A selective state space: each head has a state that decays and is updated by input-dependent amounts.

    A short convolution comes before it; gates, a norm and a projection after it.

    Args:
        num_heads: H; head_dim: D.
        num_groups: groups of heads that share B and C, the vectors that write and read the state.
        state_dim: columns of a head's state.
        kernel: tokens under the convolution, including the current one.
        norm: norm of the heads' gated output, within each group; None for none.
        conv_bias, input_bias, output_bias: whether the convolution and the projections add a learned bias.
        scales: factors of the projected gates, values, B, C and dt.

    Source: Mamba 2, arXiv 2405.21060.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel: int
    norm: RMSNorm | None
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner(self) -> int:
        """Number of values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: the heads' values, and B and C of each group."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def cache(self) -> StateCacheShape:
        """Cache of a layer: the last inputs of its convolution, and the states of its heads."""
        return StateCacheShape(self.kernel - 1, self.num_channels, (self.num_heads, self.head_dim, self.state_dim))


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The gated delta rule: each head has a state that decays, and is corrected at the token's key.

    A short convolution comes before it; a norm of each head, gates and a projection after it.

    Args:
        num_key_heads: G, heads of queries and of keys, each for H / G value heads.
        num_value_heads: H.
        key_dim: K, rows of a head's state; value_dim: V, its columns.
        kernel: tokens under the convolution, including the current one.
        norm: norm of a head's output, before the gates.
        by_key_head: the rows of the stored input projections are in groups of a key head: its queries, keys, values and
            gates in the first projection, its two gates of each value head in the second.

    Source: Gated Delta Networks, arXiv 2412.06464.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm: RMSNorm
    by_key_head: bool = False

    @property
    def inner(self) -> int:
        """Number of values of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def cache(self) -> StateCacheShape:
        """Cache of a layer: the last inputs of its convolution, and the states of its heads."""
        return StateCacheShape(self.kernel - 1, self.num_channels, (self.num_value_heads, self.key_dim, self.value_dim))
