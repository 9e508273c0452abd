"""Models of transformers as values: a `HostedSpec` describes a decoder whose layers transformers' modules compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quire.models.specs.parameter_counts import ParameterCounts
from quire.models.specs.pooled_spec import ClassifierHead, Dense
from quire.models.specs.spec import ImageRows, LayerGroup, TokenCacheShape

# Reasons why an architecture of transformers cannot run over paged memory:
# state      rows of a sequence are mixed outside of attention, or another cache than keys and values is kept
# attention  attention is computed without transformers' attention interface
# mask       a mask, or an argument of attention, that is not known
# shape      heads or rows that paged attention does not take
# encoder    no causal decoder: bidirectional attention, cross-attention, or no causal language model at all
Hindrance = Literal["state", "attention", "mask", "shape", "encoder"]


@dataclass(frozen=True, slots=True)
class HostedHeads:
    """The heads that a module gives to attention, where a backend can compute them: the names of the parts involved.

    Args:
        projections: linear layers whose outputs are queries, keys and values.
        output: linear layer of the result.
        norms: norms of each head of queries, and of keys; none if they are not normed.
        rotates: whether queries and keys are rotated, by pairs of the two halves of a head.
        num_results: values that its forward pass returns: the result, and None for the others.
    """

    projections: tuple[str, ...]
    output: str
    norms: tuple[str, ...]
    rotates: bool
    num_results: int


@dataclass(frozen=True, slots=True)
class HostedAttention:
    """One call of the attention function in a forward pass.

    Args:
        module: name of the module that calls.
        layer_idx: the module's own index; -1 without one.
        num_heads, num_kv_heads: query heads, and heads of keys and values.
        key_width, value_width: values of a head of keys and of a head of values.
        window: tokens that a token sees, including itself; None for all before it.
        chunk: length of the chunks, in tokens; a token sees its own chunk, up to itself. None for no chunks.
        scale: factor of scores before the softmax.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` before the softmax; None leaves them.
        sinks: whether the module gives a sink for each query head.
        heads: description of the module's heads; None if a backend cannot compute them.
    """

    module: str
    layer_idx: int
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    window: int | None
    chunk: int | None
    scale: float
    soft_cap: float | None
    sinks: bool
    heads: HostedHeads | None = None

    @property
    def head_dim(self) -> int:
        """Width of a head in the cache, even, for keys and values: the narrower ones are padded with zeros."""
        return -(-max(self.key_width, self.value_width) // 2) * 2

    @property
    def cache(self) -> TokenCacheShape:
        """Shape of the cache of the call's keys and values."""
        return TokenCacheShape(self.num_kv_heads, self.head_dim, self.window, self.chunk)


@dataclass(frozen=True, slots=True)
class HostedSpec:
    """A decoder-only language model that transformers' modules compute.

    Args:
        library: transformers and its version.
        architecture: name of the class.
        body: name of the module that computes hidden states, in the causal language model.
        config: content of `config.json`, without its quantisation.
        vocab_size: number of logits.
        width: E, the size of a hidden state.
        num_layers: number of layers.
        max_position: the longest context that the model was made for, in tokens.
        attention: calls of the attention function in a forward pass, in order.
        parameters: numbers of parameters.
        most_columns: columns of the widest linear layer, which may be the head.
        original_length: context from which a model with LongRoPE rotates by its long factors; None for others.
        context_length: longest context that is served; it decides about the factors, see `LongRopeScaling`.
        kept_layers: linear layers whose weights other modules read, and which stay tensors.
        adapted_layers: linear layers that take all rows of a step, to which adapters can be applied.
        classifier, dense: layers over pooled states, as of `ModelSpec`; none.
    """

    library: str
    architecture: str
    body: str
    config: Mapping[str, Any] = field(compare=False, repr=False)
    vocab_size: int
    width: int
    num_layers: int
    max_position: int
    attention: tuple[HostedAttention, ...]
    parameters: ParameterCounts
    most_columns: int
    original_length: int | None
    context_length: int
    kept_layers: frozenset[str] = frozenset()
    adapted_layers: frozenset[str] = frozenset()
    classifier: ClassifierHead | None = None
    dense: tuple[Dense, ...] = ()

    def for_context(self, length: int) -> HostedSpec:
        """Return the model for contexts of at most `length` tokens."""
        return replace(self, context_length=length)

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences from a family, as sentences for people."""
        computed = (
            f"Modules of {self.library} compute {self.architecture}, with Quire's attention: slower than a family, as "
            "most operators run one by one; no step is captured, and neither deterministic nor ranks are supported"
        )
        stored = sum(2 * call.num_kv_heads * call.head_dim for call in self.attention)
        own = sum(call.num_kv_heads * (call.key_width + call.value_width) for call in self.attention)
        padded = next((call for call in self.attention if {call.key_width, call.value_width} != {call.head_dim}), None)
        if padded is None:
            return (computed,)
        return (
            computed,
            f"Keys of {padded.key_width} and values of {padded.value_width} numbers a head are stored in heads of "
            f"{padded.head_dim}: the KV cache takes {stored / own:.2f} times their bytes",
        )

    @property
    def has_long_factors(self) -> bool:
        """True if keys are rotated by the long factors of a LongRoPE scaling."""
        return self.original_length is not None and self.context_length > self.original_length

    @property
    def image_rows(self) -> ImageRows:
        """Treatment of the rows of images, as of `ModelSpec`."""
        return ImageRows()

    @property
    def cache_groups(self) -> tuple[LayerGroup, ...]:
        """The cache groups in the order of their first calls."""
        caches = [call.cache for call in self.attention]
        return tuple(LayerGroup(caches.count(cache), cache) for cache in dict.fromkeys(caches))

    @property
    def cache_positions(self) -> tuple[tuple[int, int], ...]:
        """For each call of the attention function, the cache group and the position in it."""
        filled: dict[TokenCacheShape, int] = {}
        groups = [group.cache for group in self.cache_groups]
        positions = []
        for call in self.attention:
            position = filled.setdefault(call.cache, 0)
            positions.append((groups.index(call.cache), position))
            filled[call.cache] = position + 1
        return tuple(positions)
