"""The least that steps have to read and compute, and the least time that takes at given rates.

A lower bound by bytes and operations: it counts weights and caches read once a step and the products with them, where
their results are of any use, and leaves out all else (what is written, norms, gates, softmax, waiting).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from quire.config import Quantization
from quire.models.spec import Attention, Experts, GatedMLP, LayerSpec, Mixer, ModelSpec, StateCacheShape

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
        num_read: the last of them that go through the head.
    """

    start: int
    num_pending: int
    num_read: int


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
        num_body: parameters that a token is multiplied by, without the next two.
        num_tail: those behind the last keys, values and states, which only tokens that go through the head need.
        num_head: those of the head.
        element_bytes: of a cached value.
        weight_bytes: of a parameter, and of one of the head.
        attention: each kind of attention layer, and how many there are.
        late_attention: the same of layers that compute only for tokens that go through the head.
        state_bytes: of one sequence's states, all layers.
        num_state_values: values of them that a token changes.
    """

    num_body: int
    num_tail: int
    num_head: int
    element_bytes: int
    weight_bytes: tuple[float, float]
    attention: tuple[tuple[AttentionShape, int], ...]
    late_attention: tuple[tuple[AttentionShape, int], ...] = ()
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
        last = spec.last_cached_layer
        states = [part.kept for layer in spec.layers for part in layer.parts if isinstance(part.kept, StateCacheShape)]
        sizes = {name: math.prod(shape) for name, shape in weights.items() if name not in (*TABLES, HEAD)}
        num_idle = [_num_idle(layer.ffn, spec.width) for layer in spec.layers]
        num_tail = sum(size for name, size in sizes.items() if _is_late(name, last)) - sum(num_idle[last:])
        # They are stored with keys and values, which all tokens need.
        num_tail += sum(_num_queries(part, spec.width) for part in spec.layers[last].parts)
        return cls(
            num_body=sum(sizes.values()) - sum(num_idle) - num_tail,
            num_tail=num_tail,
            num_head=spec.vocab_size * spec.width,
            element_bytes=cached_bytes or element_bytes,
            weight_bytes=(element_bytes, element_bytes) if quantization is None else ROUNDED_BYTES[quantization],
            attention=_attention(spec.layers[:last]),
            late_attention=_attention(spec.layers[last:]),
            state_bytes=sum(kept.sum_bytes + kept.num_inputs * element_bytes for kept in states),
            num_state_values=sum(math.prod(kept.sums) for kept in states),
        )


class StepWork(NamedTuple):
    """What was to be done.

    Args:
        weight_bytes, cache_bytes: to be read: weights, and keys, values and states.
        operations: multiplications and additions, one each.
    """

    weight_bytes: int = 0
    cache_bytes: int = 0
    operations: int = 0

    def plus(self, other: StepWork) -> StepWork:
        """Return the sum."""
        return StepWork(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Rates(NamedTuple):
    """What a machine does in a second.

    Args:
        read_bytes_per_s: from memory.
        operations_per_s: in large products.
    """

    read_bytes_per_s: float
    operations_per_s: float


def step_work(model: ModelShape, items: Iterable[StepItem]) -> StepWork:
    """Return the least work of one step: weights are read once, each sequence's cache once.

    Sequences that share cached blocks are counted as if they did not.
    """
    num_tokens = num_read = cached_values = attention_operations = num_carried = 0
    for start, count, item_read in items:
        num_tokens += count
        num_read += item_read
        num_carried += start > 0
        for attention, num_rows in ((model.attention, count), (model.late_attention, item_read)):
            if not num_rows:
                continue
            first = start + count - num_rows
            for (num_heads, num_kv_heads, head_dim, window, chunk), num_layers in attention:
                # Products of a row with the keys that it sees, and of the result with their values.
                num_seen = seen_by_rows(first, num_rows, window, chunk)
                attention_operations += 4 * num_layers * num_heads * head_dim * num_seen
                # What a row sees that this step has computed is not read from memory.
                num_cached = max(0, seen_of_cache(first, window, chunk) - (first - start))
                cached_values += 2 * num_layers * num_kv_heads * head_dim * num_cached
    read_weights = int(model.weight_bytes[0] * model.num_tail) + int(model.weight_bytes[1] * model.num_head)
    return StepWork(
        weight_bytes=int(model.weight_bytes[0] * model.num_body) + (read_weights if num_read else 0),
        cache_bytes=model.element_bytes * cached_values + model.state_bytes * num_carried,
        operations=2 * (num_tokens * model.num_body + num_read * (model.num_tail + model.num_head))
        + attention_operations
        + STATE_OPERATIONS * num_tokens * model.num_state_values,
    )


def _attention(layers: Iterable[LayerSpec]) -> tuple[tuple[AttentionShape, int], ...]:
    """Return each kind of attention, and in how many places it is."""
    found = Counter(
        AttentionShape(part.num_heads, part.num_kv_heads, part.head_dim, part.window, part.chunk)
        for layer in layers
        for part in layer.parts
        if isinstance(part, Attention)
    )
    return tuple(found.items())


def _is_late(name: str, last: int) -> bool:
    """Say whether a weight comes behind what the last layer that keeps something gathers."""
    kind, *path = name.split(".")
    if kind != "layers" or int(path[0]) != last:
        return kind == "norm" or (kind == "layers" and int(path[0]) > last)
    return path[1] not in ("mixer_norm", "mixer") or "output" in path


def _num_queries(mixer: Mixer, width: int) -> int:
    """Return the parameters that make queries, and gates on what they gather."""
    if not isinstance(mixer, Attention):
        return 0
    return mixer.num_heads * mixer.head_dim * width * (2 if mixer.output_gate else 1)


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


def least_s(work: StepWork, rates: Rates) -> float:
    """Return the least seconds of one step: the longer one of reading and computing, as if they fully overlapped."""
    num_bytes = work.weight_bytes + work.cache_bytes
    return max(num_bytes / rates.read_bytes_per_s, work.operations / rates.operations_per_s)
