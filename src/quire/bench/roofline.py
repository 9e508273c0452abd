"""The least that steps have to read and compute, and the least time that takes at given rates.

A lower bound by bytes and operations: it counts weights and caches read once a step and the products with them, and
leaves out all else (what is written, norms, gates, softmax, waiting).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Final, NamedTuple

from quire.config import Quantization
from quire.models.spec import Attention, Experts, GatedMLP, KeptState, ModelSpec

# Tables of which a step reads a row for each token, and no more.
TABLES = ("embedding.weight", "per_layer_inputs.embedding.weight")
HEAD = "head.weight"
# Bytes of a rounded weight, and of one of the head: at four and at six bits each 32 share a scale of two bytes.
ROUNDED_BYTES: Final[Mapping[Quantization, tuple[float, float]]] = {"int8": (1.0, 1.0), "int4": (9 / 16, 13 / 16)}
# Two multiply-adds: what a token adds to each value of a state, and what it reads of it.
STATE_OPERATIONS = 4


class StepItem(NamedTuple):
    """One sequence's share of a step.

    Args:
        start: tokens that are cached.
        num_pending: tokens that are computed.
        is_sampled: whether the last of them goes through the head.
    """

    start: int
    num_pending: int
    is_sampled: bool


class AttentionShape(NamedTuple):
    """What attention layers read and compute; see `quire.models.spec.Attention`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    chunk: int | None = None


class ModelShape(NamedTuple):
    """What the work of a step depends on.

    Args:
        num_body: parameters that a token is multiplied by, without the head's.
        num_head: those of the head.
        element_bytes: of a cached value.
        weight_bytes: of a parameter, and of one of the head.
        attention: each kind of attention layer, and how many there are.
        state_bytes: of one sequence's states, all layers.
        num_state_values: values of them that a token changes.
    """

    num_body: int
    num_head: int
    element_bytes: int
    weight_bytes: tuple[float, float]
    attention: tuple[tuple[AttentionShape, int], ...]
    state_bytes: int = 0
    num_state_values: int = 0

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        weights: Mapping[str, tuple[int, ...]],
        element_bytes: int,
        quantization: Quantization | None = None,
        cached_bytes: int | None = None,
    ) -> ModelShape:
        """Read a model.

        Args:
            spec: of the model.
            weights: shape of every weight, by name.
            element_bytes: of the model's dtype.
            quantization: of its linear layers.
            cached_bytes: of a cached key's or value's number; None for `element_bytes`.
        """
        parts = [part for layer in spec.layers for part in layer.parts]
        attention = Counter(
            AttentionShape(part.num_heads, part.num_kv_heads, part.head_dim, part.window, part.chunk)
            for part in parts
            if isinstance(part, Attention)
        )
        states = [part.kept for part in parts if isinstance(part.kept, KeptState)]
        return cls(
            num_body=sum(math.prod(shape) for name, shape in weights.items() if name not in (*TABLES, HEAD))
            - sum(map(_num_idle, (layer.ffn for layer in spec.layers), repeat(spec.width))),
            num_head=spec.vocab_size * spec.width,
            element_bytes=cached_bytes or element_bytes,
            weight_bytes=(element_bytes, element_bytes) if quantization is None else ROUNDED_BYTES[quantization],
            attention=tuple(attention.items()),
            state_bytes=sum(kept.sum_bytes + kept.num_inputs * element_bytes for kept in states),
            num_state_values=sum(math.prod(kept.sums) for kept in states),
        )


class Work(NamedTuple):
    """What was to be done.

    Args:
        weight_bytes, cache_bytes: to be read: weights, and keys, values and states.
        operations: multiplications and additions, one each.
    """

    weight_bytes: int = 0
    cache_bytes: int = 0
    operations: int = 0

    def plus(self, other: Work) -> Work:
        """Return the sum."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Rates(NamedTuple):
    """What a machine does in a second.

    Args:
        read_bytes_per_s: from memory.
        operations_per_s: in large products.
    """

    read_bytes_per_s: float
    operations_per_s: float


def step_work(model: ModelShape, items: Iterable[StepItem]) -> Work:
    """Return the least work of one step: weights are read once, each sequence's cache once.

    Sequences that share cached blocks are counted as if they did not.
    """
    num_tokens = num_sampled = cached_values = attention_operations = num_carried = 0
    for start, count, is_sampled in items:
        num_tokens += count
        num_sampled += is_sampled
        num_carried += start > 0
        for (num_heads, num_kv_heads, head_dim, window, chunk), num_layers in model.attention:
            # Products of a row with the keys that it sees, and of the result with their values.
            attention_operations += 4 * num_layers * num_heads * head_dim * seen_by_rows(start, count, window, chunk)
            cached_values += 2 * num_layers * num_kv_heads * head_dim * seen_of_cache(start, window, chunk)
    return Work(
        weight_bytes=int(model.weight_bytes[0] * model.num_body)
        + (int(model.weight_bytes[1] * model.num_head) if num_sampled else 0),
        cache_bytes=model.element_bytes * cached_values + model.state_bytes * num_carried,
        operations=2 * (num_tokens * model.num_body + num_sampled * model.num_head)
        + attention_operations
        + STATE_OPERATIONS * num_tokens * model.num_state_values,
    )


def _num_idle(ffn: GatedMLP | Experts, width: int) -> int:
    """Return the parameters of a layer that a token goes past: those of the experts that were not chosen for it."""
    return (ffn.num_experts - ffn.num_chosen) * 3 * ffn.width * width if isinstance(ffn, Experts) else 0


def seen_of_cache(start: int, window: int | None, chunk: int | None = None) -> int:
    """Return how many of `start` cached tokens the row behind them sees."""
    if chunk is not None:
        return start % chunk
    return start if window is None else min(start, window - 1)


def seen_by_rows(start: int, count: int, window: int | None, chunk: int | None = None) -> int:
    """Return how many tokens the rows at `[start, start + count)` see, all together; each sees itself.

    ```
     row     start   ...                     start + count - 1
     sees    start + 1, start + 2, ..., window, window, window
             |<-- growing -->|          |<-- at the window -->|
    ```
    """
    if chunk is not None:
        return _seen_in_chunks(start + count, chunk) - _seen_in_chunks(start, chunk)
    num_growing = count if window is None else max(0, min(count, window - start))
    growing = num_growing * start + num_growing * (num_growing + 1) // 2
    return growing + (count - num_growing) * (window or 0)


def _seen_in_chunks(end: int, chunk: int) -> int:
    """Return how many tokens the rows at `[0, end)` see, each those of its own chunk up to itself."""
    num_whole, rest = divmod(end, chunk)
    return (num_whole * chunk * (chunk + 1) + rest * (rest + 1)) // 2


def least_s(work: Work, rates: Rates) -> float:
    """Return the least seconds of one step: the longer one of reading and computing, as if they fully overlapped."""
    num_bytes = work.weight_bytes + work.cache_bytes
    return max(num_bytes / rates.read_bytes_per_s, work.operations / rates.operations_per_s)
