"""The part of a model on one of several GPUs.

Sharding imports torch, so planning imports this module only for several GPUs.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config import ParallelConfig
from quire.models.specs.sharding import Share, shard_spec
from quire.models.specs.spec import ModelSpec


def rank_spec(spec: ModelSpec, parallel: ParallelConfig) -> ModelSpec:
    """Return the model with the first rank's part of the layers, and the whole vocabulary.

    Raises:
        ConfigError: heads or columns of a layer cannot be divided among the ranks; the message names them.
    """
    return shard_spec(spec, _share(parallel))


def stored_spec(spec: ModelSpec, parallel: ParallelConfig) -> ModelSpec:
    """Return `spec`, the first rank's layers, with the first rank's part of the tables and the head."""
    share = _share(parallel)
    inputs = spec.per_layer_inputs
    if inputs is not None:
        inputs = replace(inputs, vocab_size=share.vocabulary(inputs.vocab_size)[1])
    return replace(spec, vocab_size=share.vocabulary(spec.vocab_size)[1], per_layer_inputs=inputs)


def _share(parallel: ParallelConfig) -> Share:
    return Share(0, parallel.tensor_parallel_size, parallel.enable_expert_parallel)
