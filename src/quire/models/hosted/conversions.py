"""The tensors of a module, made of a checkpoint's by transformers' table of conversions, which is read as data.

The table has renamings, and converters with operations on the tensors that they match. Operations that only arrange
tensors become readings of the mapped files; others are run on the tensors by transformers itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from quire.errors import CheckpointError, QuireError, UnsupportedModel, describe, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.tensor_reader import BLOCKS, WEIGHT, TensorReader
from quire.models.hosted.readings import (
    ChunkReading,
    Computation,
    JoinedReading,
    Reading,
    StackedReading,
    StoredReading,
    TransposedReading,
)
from quire.models.tensors.dtypes import STORED_DTYPES

# Readings by the pattern of the table that their names match.
Values = Mapping[str, Sequence[Reading]]


class _Unchanged:
    """A module as the operations of the table see it: with its parameters, also when layers are replaced later."""

    def __init__(self, module: nn.Module, state: Mapping[str, Tensor]) -> None:
        self._module, self._state = module, state

    def get_parameter(self, name: str) -> Tensor:
        return self._state[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Conversions(NamedTuple):
    """The tensors of a module in a checkpoint.

    Args:
        readings: readings by the tensor's name in the module.
        unused: stored tensors that are no part of the module, by the names that the table gives them.
    """

    readings: dict[str, Reading]
    unused: tuple[str, ...]


def read_conversions(module: Any, checkpoint: Checkpoint, reader: TensorReader) -> Conversions:
    """Find the stored tensors that each tensor of a module is made of; nothing but headers is read.

    Args:
        module: a model of transformers; its parameters may be on the meta device.
        checkpoint: the model's files.
        reader: reads the checkpoint's files.

    Raises:
        CheckpointError: tensors do not fit together, or two are for the same tensor of the module.
        UnsupportedModel: an operation of the table cannot be applied.
    """
    state: dict[str, Tensor] = module.state_dict()
    table = get_model_conversion_mapping(module)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix: str = module.base_model_prefix
    readings: dict[str, Reading] = {}
    collected: dict[str, tuple[Any, dict[str, list[Reading]]]] = {}
    unused = []
    # Some renamings hold for names that come after another one, in this order.
    for name in sorted(stored_names(checkpoint, reader), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            unused.append(target)
            continue
        reading = StoredReading(reader, name, target, integers=not state[target].is_floating_point())
        if pattern is not None:
            collected.setdefault(target, (of_pattern[pattern], {}))[1].setdefault(pattern, []).append(reading)
        else:
            _add(readings, target, reading)
    for target, (converter, values) in collected.items():
        for name, made in _convert(converter, values, target, _Unchanged(module, state), state).items():
            _add(readings, name, made)
    return Conversions(readings, tuple(unused))


def stored_names(checkpoint: Checkpoint, reader: TensorReader) -> Iterator[str]:
    """Yield the names of stored tensors, of those that make up a quantised weight the weight's name."""
    parts: set[str] = set()
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype not in STORED_DTYPES and name not in parts:
            layer = name.rpartition(".")[0]
            for weight in (f"{layer}{WEIGHT}", name.removesuffix(BLOCKS), name):
                of_weight = reader.parts_of(weight)
                if of_weight != (weight,) and name in of_weight:
                    parts.update(of_weight)
                    yield weight
                    break
    yield from (name for name in checkpoint.tensors if name not in parts)


def _add(readings: dict[str, Reading], name: str, reading: Reading) -> None:
    if name in readings:
        raise CheckpointError(
            f"the checkpoint has two tensors for {shown(name)}: {shown(readings[name].names[0])} and "
            f"{shown(reading.names[0])}"
        )
    readings[name] = reading


def _convert(
    converter: Any, values: Values, target: str, module: _Unchanged, state: Mapping[str, Tensor]
) -> dict[str, Reading]:
    """Return what a converter makes of the tensors that it matches, by name in the module.

    Args:
        converter: entry of the table.
        values: its inputs.
        target: name in the module of the first tensor that it makes.
    """
    for idx, operation in enumerate(converter.operations):
        try:
            values = _apply(operation, values, converter, target, module, state, is_first=not idx)
        except QuireError:
            raise
        except Exception as error:  # of transformers' own operations
            names = [name for readings in values.values() for reading in readings for name in reading.names]
            raise UnsupportedModel(
                f"transformers makes {shown(target)} of {shown(names)} by {type(operation).__name__}, which failed: "
                f"{describe(error)[:200]}",
                field="architectures",
            ) from error
    key = next((key for key in values if key in target), "")
    before, _, after = target.partition(key) if key else ("", "", "")
    return {f"{before}{name}{after}": readings[0] for name, readings in values.items()}


def _apply(
    operation: Any,
    values: Values,
    converter: Any,
    target: str,
    module: _Unchanged,
    state: Mapping[str, Tensor],
    *,
    is_first: bool,
) -> Values:
    """Apply an operation of a converter; see `_convert`."""
    kind, targets = type(operation).__name__, list(converter.target_patterns)
    if kind == "MergeModulelist" and operation.dim == 0:
        keys = targets if len(values) == len(targets) == 1 else list(values)
        return {key: [StackedReading(readings)] for key, readings in zip(keys, values.values(), strict=True)}
    if kind == "Concatenate" and len(targets) == 1:
        inputs = [reading for pattern in converter.source_patterns for reading in values.get(pattern, ())]
        return {targets[0]: [JoinedReading(inputs, operation.dim)]}
    if len(values) == 1 and kind in ("Chunk", "Split", "Transpose"):
        (source, *_) = next(iter(values.values()))
        if kind == "Transpose":
            key = targets[0] if len(targets) == 1 else converter.source_patterns[0]
            is_done = getattr(operation, "check_dims", False) and source.shape == tuple(state[target].shape)
            return {key: [source if is_done else TransposedReading(source, operation.dim0, operation.dim1)]}
        if kind == "Split":
            sizes = [state[target.replace(targets[0], name)].shape[operation.dim] for name in targets]
            return _chunks(source, operation.dim, targets, sizes)
        if getattr(operation, "num_shards_attribute", None) is None:
            size = source.shape[operation.dim]
            step = -(-size // len(targets))
            sizes = [min(step, size - first) for first in range(0, size, step)]
            return _chunks(source, operation.dim, targets, sizes)

    def convert(tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Run the operation: the first one of a converter takes lists, as transformers calls it."""
        results = operation.convert(
            tensors if is_first else {key: items[0] for key, items in tensors.items()},
            source_patterns=list(converter.source_patterns),
            target_patterns=targets,
            full_layer_name=target,
            model=module,
            config=module.config,
            missing_keys=None,
        )
        return {key: result[0] if isinstance(result, list) else result for key, result in results.items()}

    return {key: [reading] for key, reading in Computation(values, convert).results().items()}


def _chunks(source: Reading, dim: int, names: Sequence[str], sizes: Sequence[int]) -> Values:
    if len(sizes) != len(names) or sum(sizes) != source.shape[dim]:
        raise CheckpointError(
            f"tensor {shown(source.names[0])} of shape {list(source.shape)} does not divide into {len(names)} parts of "
            f"{list(sizes)} on dimension {dim}"
        )
    bounds = pairwise(accumulate(sizes, initial=0))
    return {name: [ChunkReading(source, dim, *ends)] for name, ends in zip(names, bounds, strict=True)}
