"""Lower bounds of the bytes that a step reads, of its operations, and of its time at given rates.

Weights and caches are read once per step, and only products whose results are needed are counted. Writes, norms, gates,
softmax and waiting are not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from quire.config import Quantization
from quire.measurement.simulation.replicas.step_time import StepItem
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.parameter_estimate import estimate_parameters
from quire.models.specs.spec import FFN, Attention, LayerSpec, Mixer, ModelSpec, StateCacheShape, experts_of

# Tables from which a step reads one row for each token.
TABLES = ("embedding.weight", "per_layer_inputs.embedding.weight")
HEAD = "head.weight"
# Two multiply-adds for each value of a state: the update by a token, and the read of its output.
STATE_OPERATIONS = 4


class AttentionShape(NamedTuple):
    """The dimensions of an attention layer; see `quire.models.specs.spec.Attention`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    chunk: int | None = None


class ModelShape(NamedTuple):
    """The dimensions of a model that determine the work of a step.

    Args:
        num_body: number of parameters in products with every token, without `num_tail` and `num_head`.
        num_tail: number of parameters after the last keys, values and states; only tokens that go through the head
            need them.
        num_head: number of parameters of the head.
        element_bytes: bytes of a cached value.
        weight_bytes: bytes of a parameter of the body, and of a parameter of the head.
        attention: each kind of attention layer, and its number of layers.
        late_attention: the same for layers in which only tokens that go through the head are computed.
        state_bytes: bytes of one sequence's states in all layers.
        num_state_values: number of state values that a token changes.
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
        spec: ModelSpec | HostedSpec,
        weights: Mapping[str, tuple[int, ...]],
        element_bytes: int,
        quantization: Quantization | None = None,
        cached_bytes: int | None = None,
    ) -> ModelShape:
        """Return the dimensions of a model."""
        if isinstance(spec, HostedSpec):
            return cls.hosted(spec, element_bytes, quantization, cached_bytes)
        last = spec.last_cached_layer
        states = [
            part.cache for layer in spec.layers for part in layer.parts if isinstance(part.cache, StateCacheShape)
        ]
        sizes = {name: math.prod(shape) for name, shape in weights.items() if name not in (*TABLES, HEAD)}
        num_idle = [_num_idle(layer.ffn, spec.width) for layer in spec.layers]
        num_tail = sum(size for name, size in sizes.items() if _is_late(name, last)) - sum(num_idle[last:])
        # Weights of queries are stored together with weights of keys and values, which all tokens need.
        num_tail += sum(_num_queries(part, spec.width) for part in spec.layers[last].parts)
        body = head = Fraction(element_bytes)
        if quantization is not None:
            body, head = estimate_parameters(spec).bytes_of_weights(quantization)
        return cls(
            num_body=sum(sizes.values()) - sum(num_idle) - num_tail,
            num_tail=num_tail,
            num_head=spec.vocab_size * spec.width,
            element_bytes=cached_bytes or element_bytes,
            weight_bytes=(float(body), float(head)),
            attention=_attention(spec.layers[:last]),
            late_attention=_attention(spec.layers[last:]),
            state_bytes=sum(cache.sum_bytes + cache.num_inputs * element_bytes for cache in states),
            num_state_values=sum(math.prod(cache.sums) for cache in states),
        )

    @classmethod
    def estimate(
        cls,
        spec: ModelSpec | HostedSpec,
        element_bytes: int,
        quantization: Quantization | None = None,
        cached_bytes: int | None = None,
    ) -> ModelShape:
        """Return the dimensions of a model without its weights, by `estimate_parameters`.

        All rows are assumed to go through all layers, so `num_tail` is 0.
        """
        if isinstance(spec, HostedSpec):
            return cls.hosted(spec, element_bytes, quantization, cached_bytes)
        parameters = estimate_parameters(spec)
        num_idle = sum(_num_idle(layer.ffn, spec.width) for layer in spec.layers)
        body = {"layers.0.projections": (parameters.projections - num_idle,)}
        shape = cls.of(spec, body, element_bytes, quantization, cached_bytes)
        return shape._replace(
            num_body=parameters.projections - num_idle, num_tail=0, attention=_attention(spec.layers), late_attention=()
        )

    @classmethod
    def hosted(
        cls,
        spec: HostedSpec,
        element_bytes: int,
        quantization: Quantization | None = None,
        cached_bytes: int | None = None,
    ) -> ModelShape:
        """Return the dimensions of transformers' modules; of their experts, it is not known how many a token needs."""
        parameters, body, head = spec.parameters, Fraction(element_bytes), Fraction(element_bytes)
        if quantization is not None:
            body, head = parameters.bytes_of_weights(quantization)
        counts = Counter(
            AttentionShape(call.num_heads, call.num_kv_heads, call.head_dim, call.window, call.chunk)
            for call in spec.attention
        )
        return cls(
            num_body=parameters.projections - parameters.experts,
            num_tail=0,
            num_head=parameters.head,
            element_bytes=cached_bytes or element_bytes,
            weight_bytes=(float(body), float(head)),
            attention=tuple(counts.items()),
        )


class StepWork(NamedTuple):
    """The minimum work of one or several steps.

    Args:
        weight_bytes, cache_bytes: bytes of weights, and of keys, values and states, that are read.
        operations: number of multiplications and additions.
    """

    weight_bytes: int = 0
    cache_bytes: int = 0
    operations: int = 0

    def plus(self, other: StepWork) -> StepWork:
        """Return the sum."""
        return StepWork(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Rates(NamedTuple):
    """The rates of a machine.

    Args:
        read_bytes_per_s: rate of memory reads.
        operations_per_s: rate of large products.
    """

    read_bytes_per_s: float
    operations_per_s: float


def step_work(model: ModelShape, items: Iterable[StepItem]) -> StepWork:
    """Return the minimum work of one step: weights are read once, and each sequence's cache once.

    Cached blocks that sequences share are counted once for each sequence.
    """
    num_tokens = num_read = cached_values = attention_operations = num_carried = 0
    for start, count, item_read, _ in items:
        num_tokens += count
        num_read += item_read
        num_carried += start > 0
        for attention, num_rows in ((model.attention, count), (model.late_attention, item_read)):
            if not num_rows:
                continue
            first = start + count - num_rows
            for (num_heads, num_kv_heads, head_dim, window, chunk), num_layers in attention:
                # Products of a row with visible keys, and of the scores with visible values.
                num_seen = seen_by_rows(first, num_rows, window, chunk)
                attention_operations += 4 * num_layers * num_heads * head_dim * num_seen
                # Visible tokens that this step itself computes are not read from memory.
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
    """Return each kind of attention, and its number of layers."""
    counts = Counter(
        AttentionShape(part.num_heads, part.num_kv_heads, part.head_dim, part.window, part.chunk)
        for layer in layers
        for part in layer.parts
        if isinstance(part, Attention)
    )
    return tuple(counts.items())


def _is_late(name: str, last: int) -> bool:
    """Return True for a weight that comes after the attention of the last layer with a cache."""
    kind, *path = name.split(".")
    if kind != "layers" or int(path[0]) != last:
        return kind == "norm" or (kind == "layers" and int(path[0]) > last)
    return path[1] not in ("mixer_norm", "mixer") or "output" in path


def _num_queries(mixer: Mixer, width: int) -> int:
    """Return the number of parameters of queries and of gates on the output of attention."""
    if not isinstance(mixer, Attention):
        return 0
    return mixer.num_heads * mixer.head_dim * width * (2 if mixer.output_gate else 1)


def _num_idle(ffn: FFN | None, width: int) -> int:
    """Return the number of parameters of the experts that are not selected for a token."""
    experts = experts_of(ffn)
    if experts is None:
        return 0
    return (experts.num_experts - experts.num_chosen) * (experts.gate_up_width + experts.width) * width


def seen_of_cache(start: int, window: int | None, chunk: int | None = None) -> int:
    """Return the number of the `start` cached tokens that are visible to the row after them."""
    if chunk is not None:
        return start % chunk
    return start if window is None else min(start, window - 1)


def seen_by_rows(start: int, count: int, window: int | None, chunk: int | None = None) -> int:
    """Return the sum of visible tokens over the rows `[start, start + count)`; each row sees itself.

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
    """Return the sum of visible tokens over the rows `[0, end)`; each row sees its own chunk up to itself."""
    num_whole, remainder = divmod(end, chunk)
    return (num_whole * chunk * (chunk + 1) + remainder * (remainder + 1)) // 2


def least_s(work: StepWork, rates: Rates) -> float:
    """Return the lower bound of a step's seconds: the longer of reads and operations, which overlap fully."""
    num_bytes = work.weight_bytes + work.cache_bytes
    return max(num_bytes / rates.read_bytes_per_s, work.operations / rates.operations_per_s)
