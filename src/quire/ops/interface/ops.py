"""The interface of kernel backends: their operations, and the description of a step.

A backend is one class and a line of `quire.ops.make_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.ops.interface.lora import LoraLayer
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.interface.recurrent_weights import GatedDeltaNetWeights, Mamba2Weights, ShortConvWeights

# Activations of a gate: x * sigmoid(x); gelu (arXiv 1606.08415) with tanh in place of the error function; for gpt-oss,
# x * sigmoid(ALPHA * x) with x limited to LIMIT, times `up` clamped to +-LIMIT and increased by 1.
Activation = Literal["silu", "gelu_tanh", "swigluoai"]
# Elementwise activations, in models without gates or in addition to them; "gelu" uses the error function, and "relu2"
# squares.
Elementwise = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "tanh"]
SWIGLUOAI_ALPHA: Final = 1.702
SWIGLUOAI_LIMIT: Final = 7.0
# Vectors without a larger magnitude are stored as zeros in int8, so that neither a scale nor a quotient is subnormal.
LEAST_SCALED: Final = 1e-36


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows and block tables of a step in one cache group. The rows of all sequences are concatenated.

    ```
     rows        | sequence 0 | sequence 1 | ...          row_starts
     block_ids   | table 0       | table 1       | ...    block_starts
     context     |<-- history -->|<-- rows of this step -->|
    ```

    Args:
        slot_mapping: [T] of int64; slot of each row's key and value (block id * N + offset).
        row_starts: S + 1 numbers; sequence `s` owns rows `[row_starts[s], row_starts[s + 1])`, never none.
        context_lens: S numbers; length of each sequence, including its rows of this step.
        block_ids: int64; concatenated block tables, `ceil(context_len / N)` entries of each sequence.
        block_starts: S + 1 numbers; sequence `s` owns `block_ids[block_starts[s]:block_starts[s + 1]]`.
        window: number of tokens that a row sees, itself included; None for all. Tokens that no row sees are not read.
        chunk: a row sees no further back than the start of its chunk of this many tokens; None for no chunks. It is
            not combined with a window.
        host_block_ids: copy of `block_ids` on the host, for backends that plan there; None if `block_ids` is there.
    """

    slot_mapping: Tensor
    row_starts: Sequence[int]
    context_lens: Sequence[int]
    block_ids: Tensor
    block_starts: Sequence[int]
    window: int | None = None
    chunk: int | None = None
    host_block_ids: Tensor | None = None

    def first_seen(self, position: int) -> int:
        """Return the first token that a row at a position sees; it is monotonic in the position."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position + 1 - self.window)


class PagedKV(Protocol):
    """The keys and values of one cache group, with views that are made once.

    A slot is a vector as it is stored, W elements of one of these dtypes:

    - bfloat16, float16, float32: its D values;
    - float8_e4m3fn: its D values, saturated to the range;
    - int8: its D values divided by a scale and rounded (half to even), then the scale's four bytes, a float32. The
      scale is the largest absolute value divided by 127; 0 if none is above `LEAST_SCALED`, and then all values are
      0. A vector with a NaN or an infinity is read back as NaN.

    Attributes:
        data: [B, L, 2, K, N, W].
        block_rows: a view [*, N * W] for each layer, whose row `(block_id * L * 2 + kv) * K + head` is that layer's
            block of that head (`kv` 0 for keys, 1 for values).
        slot_rows: a view [*, W] for each layer, whose row `((block_id * L * 2 + kv) * K + head) * N + offset` is that
            layer's slot of that head.
        head_dim: D.
        dtype: dtype of keys and values before they are stored, which is the dtype of a step's rows.
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
    """The sequences of a step in one cache group of states. The rows of all sequences are concatenated.

    Args:
        block_ids: S numbers; the block with each sequence's state, before the step and after it.
        row_starts: S + 1 numbers; sequence `s` owns rows `[row_starts[s], row_starts[s + 1])`, never none.
        has_state: S flags; if false, the rows are the sequence's first, and the block's contents are undefined.
    """

    block_ids: Sequence[int]
    row_starts: Sequence[int]
    has_state: Sequence[bool]


class PagedStates(Protocol):
    """The recurrent states of one cache group: a block is the state of all layers.

    Attributes:
        conv_states: a view [B, k - 1, C] for each layer, of the model's dtype: the last inputs of its convolution, the
            oldest first.
        ssm_states: a view [B, H, D, N] of float32 for each layer; [B, H, K, V] of the gated delta rule.
    """

    @property
    def conv_states(self) -> Sequence[Tensor]: ...
    @property
    def ssm_states(self) -> Sequence[Tensor]: ...


class HeadNorms(NamedTuple):
    """The norms of heads.

    Args:
        scales: a row for each query head, one for each key head and, if values are normed too, one for each value
            head: [H + K, D] or [H + 2 K, D], contiguous; of a dtype that `Ops.rms_norm` takes.
        eps: added to the mean square.
    """

    scales: Tensor
    eps: float


class Rotation(NamedTuple):
    """The rotary embedding (RoPE) of a step's rows.

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
            norms: norms of the heads; None if the model has none.
            rotation: rotation of the rows; element i of a head is paired with element i + D / 2.

        Returns:
            The queries, [T, H, D].
        """

    def prepare_queries(self, q: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm and rotate the queries of a layer that reads another layer's keys and values; nothing is stored.

        Args:
            q: [T, H * D], contiguous.
            norms: norms with `scales` of [H, D].

        Returns:
            [T, H, D].
        """

    def attend(
        self, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Compute causal attention of each row over its sequence, within the batch's window or chunk.

        Args:
            q: queries, [T, H, D].
            scale: factor of the scores before the softmax.
            sinks: attention sinks, [H] of float32, contiguous: each row's softmax has one more score, its head's sink,
                which takes weight and has no value. None for no sinks.
            soft_cap: scores, multiplied by their scale, become `soft_cap * tanh(score / soft_cap)`; sinks are not
                capped. None for no cap.

        Returns:
            [T, H * D], contiguous.

        Source: PagedAttention, arXiv 2309.06180; attention sinks, arXiv 2309.17453; soft caps, Gemma 2, arXiv
        2408.00118.
        """


class StepStates(Protocol):
    """Recurrence of one step over one cache group; made once a step, used by every layer of the group.

    A method is a mixer between its projections: it updates each sequence's state with its rows, and reads from it.
    `projected` [T, ...] is the output of the input projection; results are contiguous, of the dtype of `projected`.
    """

    def short_conv(self, layer_idx: int, projected: Tensor, weights: ShortConvWeights) -> Tensor:
        """Return `c * convolution(b * x)`, [T, C], of `b, c, x` [T, 3 C]."""

    def gated_delta_net(self, layer_idx: int, projected: Tensor, weights: GatedDeltaNetWeights) -> Tensor:
        """Convolve queries, keys and values, apply the gated delta rule, norm and gate.

        Args:
            projected: queries and keys of G heads each, values and gates of H heads, then beta and dt, [T, H] each.

        Returns:
            [T, H * V].
        """

    def mamba2(self, layer_idx: int, projected: Tensor, weights: Mamba2Weights) -> Tensor:
        """Convolve values, B and C, scan them, gate and norm.

        Args:
            projected: gates and values [T, H * D] each, B and C [T, G * N] each, dt [T, H]; in this order.

        Returns:
            [T, H * D].
        """


class Linear(Protocol):
    """A linear layer with its weight in the backend's packed layout."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias (+ residual)`: [T, in] to [T, out]; `residual` is contiguous.

        A gated layer returns half as many columns.
        """


@runtime_checkable
class KeepsRows(Protocol):
    """A linear layer that keeps its weight exactly, so that rows can be looked up."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight [out, in]: ids [T] of int64 to [T, in].

        Raises:
            IndexError: an id is out of range.
        """


@runtime_checkable
class RoundsInputs(Protocol):
    """A linear layer that may quantise its inputs.

    Attributes:
        rounds_inputs: True if all rows are quantised to int8: then rows of every dtype take the same time, and the
            result has the dtype of the rows.
    """

    @property
    def rounds_inputs(self) -> bool: ...


class Ops(Protocol):
    """The operations of a model. They do not change their arguments, except the caches that `StepAttention` and
    `StepStates` write, and the logits of `apply_token_bitmask`.

    Attributes:
        name: name of the kernels, for logs.
    """

    @property
    def name(self) -> str: ...

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,
        max_group: int = 32,
    ) -> Linear:
        """Pack a weight [out, in] and bias [out] into the layout of the backend.

        Args:
            weight: weight that is read before this returns. A stored quantised weight keeps its values, and its rows
                can be looked up, unless it is gated, or has plain parts or an input order.
            min_bits: minimum number of bits that a plain weight may be quantised to.
            gate: activation of a gated layer, which returns `Ops.gate` of its product: half as many columns as the
                weight has rows. A residual has as many columns as the weight has rows, and is added before the gate.
            num_slices: number of equal slices of the inputs, a power of two: the native kernels for quantised weights
                add their sums pairwise, as a tree, so that ranks with one slice each add up to the same bits.
            max_group: maximum number of inputs that share a scale, in a plain weight that is quantised and in its
                activations, if a form with as many bits has such groups.
        """

    def make_lora(self, num_columns: int, max_rank: int | None = None) -> LoraLayer:
        """Return a container for a linear layer's adapters, initially empty.

        Args:
            num_columns: number of rows of the layer's weight.
            max_rank: maximum total rank of an adapter's parts; None if no captured step uses the layer's adapters.
        """

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Look up rows: ids [T], weight [V, E] to [T, E]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divide rows by their root mean square, in float32, then scale them in the dtype of `weight`.

        Args:
            x: [T, E].
            weight: [E], of the dtype of `x`, or of float32: then the result is rounded once.

        Returns:
            [T, E], of the dtype of `x`.
        """

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Subtract the mean of rows and divide them by their standard deviation, then scale them.

        Args:
            x: [T, E].
            weight: [E], of the dtype of `x`.
            bias: [E], added last; None for none.

        Returns:
            [T, E], of the dtype of `x`.
        """

    def activate(self, x: Tensor, activation: Elementwise) -> Tensor:
        """Return the activation of each value of `x`."""

    def ragged_attention(
        self,
        qkv: Tensor,
        num_heads: int,
        row_starts: Sequence[int],
        rotation: Rotation | None,
        window: int | None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        """Compute bidirectional attention of each row over the rows of its sequence; nothing is cached.

        Args:
            qkv: [T, 3 * H * D], contiguous: query heads, key heads, value heads. Scores are divided by `sqrt(D)`.
            num_heads: H.
            row_starts: S + 1 numbers; sequence `s` owns rows `[row_starts[s], row_starts[s + 1])`.
            rotation: rotation of queries and keys; None for none.
            window: distance of the furthest row that a row sees on either side; None for all rows.
            distance_bias: addends of scores by head and distance of a key from its query, [H, 2 R + 1] for the
                distances from -R to R, of the dtype of `qkv`; sequences have at most R + 1 rows, and no window. None
                for none.

        Returns:
            [T, H * D], contiguous.
        """

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return `activation(gate) * up` of the two halves: [T, 2 F], contiguous, to [T, F]; see `Activation`."""

    def sigmoid_gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return `x * sigmoid(gates)` of two contiguous [T, F]; the sigmoid is rounded to their dtype."""

    def gated_norm(self, x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `norm(x * silu(gates)) * weight`, computed in float32 and rounded once.

        Args:
            x: [T, F] of float32.
            gates: [T, F], rows may be strided.
            weight: [G, F / G] of float32; each of the G parts of a row is normed separately.

        Returns:
            [T, F], contiguous, of the dtype of `gates`.
        """

    def apply_token_bitmask(self, logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
        """Set the logits of forbidden tokens, whose bits are not set, to minus infinity, in place.

        Args:
            logits: float32 [R, V], none NaN or plus infinity.
            rows: rows with a mask, each once.
            masks: mask of each of these rows, int32 [ceil(V / 32)] on the CPU; the lowest bit is the first token's.
        """

    def step_attention(self, batch: AttentionBatch, kv: PagedKV) -> StepAttention:
        """Prepare a step's attention, for all layers of a cache group."""

    def step_states(self, batch: StateBatch, states: PagedStates) -> StepStates:
        """Prepare a step's recurrence, for all layers of a cache group."""
