"""The part of a model that one of several GPUs has.

What divides models brings torch in, so planning imports this only where there are several.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config import ParallelConfig
from quire.models.specs.sharding import Share, shard_spec
from quire.models.specs.spec import ModelSpec


def rank_spec(spec: ModelSpec, parallel: ParallelConfig) -> ModelSpec:
    """Return the layers that the first rank computes; the vocabulary is the whole one.

    Raises:
        ConfigError: heads or columns of a layer cannot be divided among the ranks; the message names them.
    """
    return shard_spec(spec, _share(parallel))


def stored_spec(spec: ModelSpec, parallel: ParallelConfig) -> ModelSpec:
    """Return a model with the tables and the head that the first rank stores, given the layers that it computes."""
    share = _share(parallel)
    inputs = spec.per_layer_inputs
    if inputs is not None:
        inputs = replace(inputs, vocab_size=share.vocabulary(inputs.vocab_size)[1])
    return replace(spec, vocab_size=share.vocabulary(spec.vocab_size)[1], per_layer_inputs=inputs)


def _share(parallel: ParallelConfig) -> Share:
    return Share(0, parallel.tensor_parallel_size, parallel.enable_expert_parallel)
