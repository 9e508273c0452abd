"""The cache groups of a model as cache specs, from which the engine and `quire plan` size the KV memory."""

from __future__ import annotations

from quire.config import CacheDtype
from quire.errors import UnsupportedModel
from quire.memory.specs import ChunkedLocal, FullAttention, KVCacheSpec, RecurrentState, SlidingWindow
from quire.models.specs.encoder_spec import EncoderSpec
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.spec import LayerGroup, ModelSpec, StateCacheShape


def cache_specs(
    spec: ModelSpec | HostedSpec | EncoderSpec, block_size: int, cache_dtype: CacheDtype, input_bytes: int
) -> tuple[KVCacheSpec, ...]:
    """Return the cache spec of each cache group of a model, in the order of `ModelSpec.cache_groups`.

    An encoder has no cache. Its one group has slots that store nothing: they count the tokens of a step, so that
    scheduler and memory manager need no second kind of sequence.

    Args:
        spec: the model.
        block_size: tokens per block.
        cache_dtype: dtype of keys and values.
        input_bytes: bytes of one value in the dtype of the weights, in which recurrent layers store convolution inputs.

    Raises:
        UnsupportedModel: no layer caches tokens, so there are no blocks from which to size the KV cache.
    """
    if isinstance(spec, EncoderSpec):
        return (FullAttention(block_size=block_size, element_bytes=1),)
    specs = tuple(_cache_spec(group, block_size, cache_dtype, input_bytes) for group in spec.cache_groups)
    if all(cache_spec.is_recurrent for cache_spec in specs):
        raise UnsupportedModel(
            "config.json: layer_types has no attention, so the KV cache has no blocks of tokens", field="layer_types"
        )
    return specs


def state_bytes(cache: StateCacheShape, input_bytes: int) -> int:
    """Return the bytes of one recurrent layer's state, with convolution inputs of `input_bytes` each.

    A state has a multiple of four bytes, so that the float32 states of the next layers and blocks are aligned.
    """
    return -(-(cache.sum_bytes + cache.num_inputs * input_bytes) // 4) * 4


def _cache_spec(group: LayerGroup, block_size: int, cache_dtype: CacheDtype, input_bytes: int) -> KVCacheSpec:
    num_layers, cache = group
    if isinstance(cache, StateCacheShape):
        return RecurrentState(block_size=block_size, num_layers=num_layers, layer_bytes=state_bytes(cache, input_bytes))
    shape = {
        "block_size": block_size,
        "num_layers": num_layers,
        "num_kv_heads": cache.num_kv_heads,
        "head_dim": cache.head_dim,
        "element_bytes": cache_dtype.element_bytes,
        "scale_bytes": cache_dtype.scale_bytes,
    }
    if cache.window is not None:
        return SlidingWindow(window=cache.window, **shape)
    if cache.chunk is not None:
        return ChunkedLocal(chunk=cache.chunk, **shape)
    return FullAttention(**shape)
