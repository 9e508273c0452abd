"""The door to the kernels: what a backend computes, and what it is told about a step.

A backend is one class and one row in `quire.ops.BACKENDS`. Models and execution know this file only, and
`fused_layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

# What a gate goes through: x * sigmoid(x); gelu (arXiv 1606.08415) with tanh in place of the error function.
Activation = Literal["silu", "gelu_tanh"]
# Vectors of int8 whose values are no larger are zeros: neither a scale nor a quotient is then ever subnormal.
LEAST_SCALED: Final = 1e-36


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Who attends to what in a step, for one cache group. The rows of all sequences lie one behind the other.

    ```
     rows        | sequence 0 | sequence 1 | ...          row_starts
     block_ids   | table 0       | table 1       | ...    block_starts
     context     |<-- history -->|<-- rows of this step -->|
    ```

    Args:
        slot_mapping: [T] of int64; where each row's key and value are stored (block id * N + offset).
        row_starts: S + 1 numbers; sequence `s` owns rows `[row_starts[s], row_starts[s + 1])`, never none.
        context_lens: S numbers; tokens that the last row of each sequence sees, itself included.
        block_ids: int64; each sequence's blocks, `ceil(context_len / N)` of them, in the order of its tokens.
        block_starts: S + 1 numbers; sequence `s` owns `block_ids[block_starts[s]:block_starts[s + 1]]`.
        window: tokens that a row sees, itself included; None for all before it. What no row sees is not read.
        chunk: a row sees no further back than the start of its own chunk, a multiple of these tokens; None for no
            chunks. There is no window beside it.
    """

    slot_mapping: Tensor
    row_starts: Sequence[int]
    context_lens: Sequence[int]
    block_ids: Tensor
    block_starts: Sequence[int]
    window: int | None = None
    chunk: int | None = None

    def first_seen(self, position: int) -> int:
        """Return the first token that a row at a position sees; never falls as positions grow."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position + 1 - self.window)


class PagedKV(Protocol):
    """The keys and values of one cache group, and views of them that are made once.

    A slot is a vector as it is stored, W elements of one of these dtypes:

    - bfloat16, float16, float32: its D values;
    - float8_e4m3fn: its D values, those out of range as the largest of their sign;
    - int8: its D values divided by a scale and rounded (half to even), then the scale's four bytes, a float32. The
      scale is the largest absolute value divided by 127; 0 where none is above `LEAST_SCALED`, and then all values are
      0. A vector with a NaN or an infinity comes back as NaN.

    Attributes:
        data: [B, L, 2, K, N, W].
        block_rows: for each layer, a view [*, N * W] whose row `(block_id * L * 2 + kv) * K + head` is that layer's
            block of that head (`kv` 0 for keys, 1 for values).
        slot_rows: for each layer, a view [*, W] whose row `((block_id * L * 2 + kv) * K + head) * N + offset` is that
            layer's slot of that head.
        head_dim: D.
        dtype: of keys and values before they are stored, that of a step's rows.
    """

    @property
    def data(self) -> Tensor: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def block_rows(self) -> Sequence[Tensor]: ...
    @property
    def slot_rows(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Whose state goes on in a step, for one cache group. The rows of all sequences lie one behind the other.

    Args:
        block_ids: S numbers; the block with each sequence's state, before the step and after it.
        row_starts: S + 1 numbers; sequence `s` owns rows `[row_starts[s], row_starts[s + 1])`, never none.
        has_state: S of them; where false, no token came before the rows, and the block may hold anything.
    """

    block_ids: Sequence[int]
    row_starts: Sequence[int]
    has_state: Sequence[bool]


class PagedStates(Protocol):
    """The states of one cache group: a block is one state, of all layers.

    Attributes:
        inputs: for each layer a view [B, k - 1, C], of the model's dtype: what its convolution saw last, oldest first.
        sums: for each layer a view [B, H, D, N] of float32: what each head adds up over all tokens; [B, H, K, V] where
            rows correct it.
    """

    @property
    def inputs(self) -> Sequence[Tensor]: ...
    @property
    def sums(self) -> Sequence[Tensor]: ...


class HeadNorms(NamedTuple):
    """The norms of heads.

    Args:
        scales: a row for each query head, one for each key head and, where values are normed too, one for each value
            head: [H + K, D] or [H + 2 K, D], contiguous; of a dtype as `Ops.rms_norm` takes it.
        eps: added to the mean square.
    """

    scales: Tensor
    eps: float


class Rotation(NamedTuple):
    """The angles of a step's rows.

    Args:
        cos: [T, 1, D], contiguous.
        sin: [T, 1, D], contiguous, its first half negated.
    """

    cos: Tensor
    sin: Tensor


class StepAttention(Protocol):
    """Attention of one step over one cache group; made once a step, used by every layer of the group."""

    def prepare(self, layer_idx: int, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm heads, rotate queries and keys, and store keys and values in the step's slots.

        Args:
            qkv: [T, (H + 2 K) * D], contiguous: query heads, key heads, value heads.
            norms: of the heads, where the model has them.
            rotation: its halves turn against each other.

        Returns:
            The queries, [T, H, D].
        """
        ...

    def prepare_queries(self, q: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm and rotate the queries of a layer that reads what another layer stored; nothing is stored.

        Args:
            q: [T, H * D], contiguous.
            norms: with `scales` of [H, D].

        Returns:
            [T, H, D].
        """
        ...

    def attend(self, layer_idx: int, q: Tensor, scale: float) -> Tensor:
        """Let each row see its sequence up to itself, as far back as the batch says, through the block table.

        Args:
            q: queries, [T, H, D].
            scale: of the scores before the softmax.

        Returns:
            [T, H * D], contiguous.

        Source: PagedAttention, arXiv 2309.06180.
        """
        ...


class ScanHeads(NamedTuple):
    """What the heads of a selective state space have learned, [H] of float32 each.

    Args:
        decays: how fast a head forgets; negative.
        step_biases: added to a token's step before the softplus.
        skips: how much of a token's value goes past the state.
    """

    decays: Tensor
    step_biases: Tensor
    skips: Tensor


class StepStates(Protocol):
    """Recurrence of one step over one cache group; made once a step, used by every layer of the group."""

    def convolve(self, layer_idx: int, x: Tensor, taps: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
        """Let each row see itself and the inputs before it, each channel by itself, and keep the last inputs.

        Args:
            x: [T, C].
            taps: [k, C] of float32, that of the row itself last.
            bias: [C] of float32.
            activation: whether the sum goes through silu.

        Returns:
            [T, C], contiguous, of the dtype of `x`; summed in float32, rounded once.
        """
        ...

    def scan(self, layer_idx: int, x: Tensor, write: Tensor, read: Tensor, steps: Tensor, heads: ScanHeads) -> Tensor:
        """Take each row into its sequence's state, and read from it.

        For each head, with `step = softplus(steps + step_bias)` and a [D, N] matrix S:

            S = exp(step * decay) * S + step * outer(x, write)
            y = S @ read + skip * x

        Args:
            x: [T, H * D].
            write, read: [T, G * N]; heads `[g * H / G, (g + 1) * H / G)` share part `g`.
            steps: [T, H].
            heads: of the layer.

        Returns:
            [T, H * D] of float32, contiguous.

        Source: Mamba 2, arXiv 2405.21060.
        """
        ...

    def correct(
        self, layer_idx: int, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
    ) -> Tensor:
        """Correct each sequence's state by its rows, and read from it: the gated delta rule.

        For each head, with a [K, V] matrix S:

            S = exp(decay) * S
            S = S + outer(key, rate * (value - key @ S))
            y = query @ S

        Args:
            queries, keys: [T, G * K] of float32, keys of a length of 1 at most; heads `[g * H / G, (g + 1) * H / G)`
                share part `g`.
            values: [T, H * V].
            decays: [T, H] of float32, the logarithms of what each row leaves of the state.
            rates: [T, H] of float32, from 0 to 1: how far a row takes what its key finds to its value.

        Returns:
            [T, H * V] of float32, contiguous.

        Source: Gated Delta Networks, arXiv 2412.06464.
        """
        ...


class Linear(Protocol):
    """A linear layer whose weight lies as the backend likes it."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias (+ residual)`: [T, in] to [T, out]; `residual` is contiguous."""
        ...


@runtime_checkable
class KeepsRows(Protocol):
    """A linear layer that still has each bit of its weight."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight [out, in]: ids [T] of int64 to [T, in].

        Raises:
            IndexError: an id that is no row.
        """
        ...


class Ops(Protocol):
    """What a model needs computed. Nothing here changes its arguments, except the cache that `StepAttention` writes and
    the logits of `apply_token_bitmask`.

    Attributes:
        name: what computes, for people.
    """

    @property
    def name(self) -> str: ...

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, min_bits: int = 4, gate: Activation | None = None
    ) -> Linear:
        """Take a weight [out, in] and bias [out]; how the weight is kept is the backend's affair.

        Args:
            weight: read before this returns, and not kept.
            min_bits: it must not be rounded to fewer.
            gate: the layer gives `gate` of its product, as the method of that name does with this activation: half as
                many columns as the weight has rows; it is called without a residual.
        """
        ...

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Look up rows: ids [T], weight [V, E] to [T, E]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divide rows by their root mean square, in float32, then scale them in the dtype of `weight`.

        Args:
            x: [T, E].
            weight: [E], of the dtype of `x`, or of float32: then the result is rounded once.

        Returns:
            [T, E], of the dtype of `x`.
        """
        ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return `activation(gate) * up` of the two halves: [T, 2 F], contiguous, to [T, F]."""
        ...

    def gated_norm(self, x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `norm(x * silu(gates)) * weight`, computed in float32 and rounded once.

        Args:
            x: [T, F] of float32.
            gates: [T, F], rows may lie apart.
            weight: [G, F / G] of float32; each of the G parts of a row is normed by itself.

        Returns:
            [T, F], contiguous, of the dtype of `gates`.
        """
        ...

    def apply_token_bitmask(self, logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
        """Set all tokens of some rows to minus infinity, in place, but those whose bits are set.

        Args:
            logits: float32 [R, V], none NaN or plus infinity.
            rows: each once.
            masks: one for each of them, int32 [ceil(V / 32)] on the CPU; the lowest bit is the first token's.
        """
        ...

    def step_attention(self, batch: AttentionBatch, kv: PagedKV) -> StepAttention:
        """Prepare what all layers of a step share."""
        ...

    def step_states(self, batch: StateBatch, states: PagedStates) -> StepStates:
        """Prepare what all layers of a step share."""
        ...
