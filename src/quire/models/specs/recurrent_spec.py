"""Recurrent mixers as values, and the cache of a sequence in their layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from quire.models.specs.norm_spec import RMSNorm


class StateCacheShape(NamedTuple):
    """The cache of a sequence in a recurrent layer; layers with equal ones are one group.

    Args:
        num_columns, num_channels: the last inputs of its convolution, in the model's dtype.
        sums: the shape of what it adds up over all tokens, in float32; a dimension of 0 where there is nothing.
    """

    num_columns: int
    num_channels: int
    sums: tuple[int, int, int] = (0, 0, 0)

    @property
    def num_inputs(self) -> int:
        """Values of the last inputs."""
        return self.num_columns * self.num_channels

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sums."""
        return 4 * math.prod(self.sums)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Gated short convolution: `output(c * convolution(b * x))`, of three projections `b, c, x`.

    Args:
        num_channels: values of a token that the convolution sees, each channel by itself.
        kernel: tokens that it sees, the token itself included.
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
    """A selective state space: each head keeps a matrix that forgets and takes in as the token says.

    A short convolution comes before it; gates, a norm and a projection after it.

    Args:
        num_heads: H; head_dim: D.
        num_groups: groups of heads that share what is read from and written to the state.
        state_dim: columns of a head's matrix.
        kernel: tokens that the convolution sees, the token itself included.
        norm: norm of the heads' gated output, of each group by itself; None for none.
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
        """Values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Values of a token that the convolution sees: of the heads, and what each group writes and reads by."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def cache(self) -> StateCacheShape:
        """Cache of a layer: the last inputs of its convolution, and the states of its heads."""
        return StateCacheShape(self.kernel - 1, self.num_channels, (self.num_heads, self.head_dim, self.state_dim))


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The gated delta rule: each head keeps a matrix that forgets, and is corrected where a token's key looks.

    A short convolution comes before it; a norm of each head, gates and a projection after it.

    Args:
        num_key_heads: G, of queries and of keys; each serves H / G value heads.
        num_value_heads: H.
        key_dim: K, rows of a head's matrix; value_dim: V, its columns.
        kernel: tokens that the convolution sees, the token itself included.
        norm: norm of a head's output, before the gates.

    Source: Gated Delta Networks, arXiv 2412.06464.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm: RMSNorm

    @property
    def inner(self) -> int:
        """Values of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Values of a token that the convolution sees: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def cache(self) -> StateCacheShape:
        """Cache of a layer: the last inputs of its convolution, and the states of its heads."""
        return StateCacheShape(self.kernel - 1, self.num_channels, (self.num_value_heads, self.key_dim, self.value_dim))
