"""Tensors that are made of stored tensors, described before a byte is read.

A checkpoint may store a tensor of a module in another arrangement: the experts of a layer one by one, queries, keys and
values in one matrix. A `Reading` says how a tensor is put together. Its shape is known from the headers of the files;
its parts stay quantised as they are stored where the arrangement allows it, which is along the outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import CheckpointError, shown
from quire.models.checkpoints.tensor_reader import TensorReader
from quire.models.tensors.layer_weight import LayerWeight
from quire.ops.interface.quantized_weight import StoredWeight


class Reading(Protocol):
    """A tensor that is read when it is needed.

    Attributes:
        shape: its shape; of a quantised matrix [out, in], whatever the arrangement of its codes.
        names: the stored tensors that it is made of, by the names of their layers' weights.
        is_quantized: whether its parts are codes.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def is_quantized(self) -> bool: ...

    def tensor(self) -> Tensor:
        """Return the values in the stored dtype, of codes in float32; it may be a view of a mapped file."""

    def parts(self) -> list[Tensor | LayerWeight]:
        """Return what gives the tensor when concatenated on dimension 0."""

    def slices(self) -> Sequence[Reading] | None:
        """Return the readings of the items along dimension 0; None if all are stored in one tensor."""


class StoredReading:
    """A tensor as it is stored.

    Args:
        reader: reads the checkpoint's files.
        name: name of the tensor; of a quantised matrix, of its layer's weight.
        wanted_by: the tensor of the module that it is for, for messages.
        integers: it holds integers or flags.
    """

    def __init__(self, reader: TensorReader, name: str, wanted_by: str, *, integers: bool = False) -> None:
        self._reader, self.names = reader, (name,)
        self.is_quantized = reader.parts_of(name) != (name,)
        self.shape = reader.stack_shape(name) or reader.shape(name, wanted_by, integers=integers)

    def tensor(self) -> Tensor:
        """See `Reading`."""
        return values_of(self._reader.read(self.names[0])).view(self.shape)

    def parts(self) -> list[Tensor | LayerWeight]:
        """See `Reading`."""
        return [self._reader.read(self.names[0])]

    def slices(self) -> None:
        """See `Reading`."""
        return


class JoinedReading:
    """Tensors that are concatenated on a dimension."""

    def __init__(self, inputs: Sequence[Reading], dim: int) -> None:
        self._inputs, self._dim = inputs, dim
        self.shape = _joined_shape(inputs, dim)
        self.names = tuple(name for reading in inputs for name in reading.names)
        self.is_quantized = any(reading.is_quantized for reading in inputs)

    def tensor(self) -> Tensor:
        """See `Reading`."""
        return torch.cat([reading.tensor() for reading in self._inputs], self._dim)

    def parts(self) -> list[Tensor | LayerWeight]:
        """See `Reading`."""
        if self._dim:
            return [self.tensor()]
        return [part for reading in self._inputs for part in reading.parts()]

    def slices(self) -> Sequence[Reading] | None:
        """See `Reading`."""
        of_inputs = [reading.slices() for reading in self._inputs]
        if not self._dim or any(slices is None for slices in of_inputs):
            return None
        groups = zip(*(slices for slices in of_inputs if slices is not None), strict=True)
        return [JoinedReading(group, self._dim - 1) for group in groups]


class StackedReading:
    """Tensors of one shape along a new dimension 0."""

    def __init__(self, inputs: Sequence[Reading]) -> None:
        self._inputs = inputs
        shapes = {reading.shape for reading in inputs}
        if len(shapes) != 1:
            raise CheckpointError(
                f"tensors like {shown(inputs[0].names[0])} belong together and must be of one shape, got "
                f"{', '.join(str(list(shape)) for shape in sorted(shapes)[:3])}"
            )
        self.shape = (len(inputs), *inputs[0].shape)
        self.names = tuple(name for reading in inputs for name in reading.names)
        self.is_quantized = any(reading.is_quantized for reading in inputs)

    def tensor(self) -> Tensor:
        """See `Reading`."""
        return torch.stack([reading.tensor() for reading in self._inputs])

    def parts(self) -> list[Tensor | LayerWeight]:
        """See `Reading`."""
        return [self.tensor()]

    def slices(self) -> Sequence[Reading]:
        """See `Reading`."""
        return self._inputs


class ChunkReading:
    """A range of a tensor along a dimension."""

    def __init__(self, source: Reading, dim: int, first: int, end: int) -> None:
        self._source, self._dim, self._range = source, dim, slice(first, end)
        self.shape = (*source.shape[:dim], end - first, *source.shape[dim + 1 :])
        self.names, self.is_quantized = source.names, source.is_quantized

    def tensor(self) -> Tensor:
        """See `Reading`."""
        return self._source.tensor().narrow(self._dim, self._range.start, self.shape[self._dim])

    def parts(self) -> list[Tensor | LayerWeight]:
        """See `Reading`."""
        parts = self._source.parts() if not self._dim else []
        if len(parts) == 1 and isinstance(parts[0], LayerWeight):
            return [LayerWeight(parts[0].weight.rows(self._range), parts[0].input_order)]
        return [self.tensor()]

    def slices(self) -> None:
        """See `Reading`."""
        return


class TransposedReading:
    """A tensor with two dimensions swapped."""

    def __init__(self, source: Reading, first: int, second: int) -> None:
        self._source, self._dims = source, (first, second)
        shape = list(source.shape)
        shape[first], shape[second] = shape[second], shape[first]
        self.shape, self.names, self.is_quantized = tuple(shape), source.names, False

    def tensor(self) -> Tensor:
        """See `Reading`."""
        return self._source.tensor().transpose(*self._dims)

    def parts(self) -> list[Tensor | LayerWeight]:
        """See `Reading`."""
        return [self.tensor()]

    def slices(self) -> Sequence[Reading] | None:
        """See `Reading`."""
        of_source, (first, second) = self._source.slices(), self._dims
        if of_source is None or not first or not second:
            return None
        return [TransposedReading(reading, first - 1, second - 1) for reading in of_source]


class Computation:
    """A function from tensors to named tensors, which is run once for all its results.

    Args:
        inputs: the tensors of each argument.
        function: the function; it gives the same shapes on the meta device.
    """

    def __init__(
        self,
        inputs: Mapping[str, Sequence[Reading]],
        function: Callable[[dict[str, list[Tensor]]], Mapping[str, Tensor]],
    ) -> None:
        self._inputs, self._function = inputs, function
        self.names = tuple(name for readings in inputs.values() for reading in readings for name in reading.names)
        self._left: dict[str, Tensor] = {}

    def results(self) -> dict[str, Reading]:
        """Return the function's results, after a run on tensors without values."""
        empty = self._function(
            {
                name: [torch.empty(reading.shape, device="meta") for reading in readings]
                for name, readings in self._inputs.items()
            }
        )
        return {name: ComputedReading(self, name, tuple(tensor.shape)) for name, tensor in empty.items()}

    def take(self, name: str) -> Tensor:
        """Return a result, which is dropped here."""
        if name not in self._left:
            inputs = {key: [reading.tensor() for reading in readings] for key, readings in self._inputs.items()}
            self._left = dict(self._function(inputs))
        return self._left.pop(name)


class ComputedReading:
    """A result of a computation."""

    def __init__(self, computation: Computation, name: str, shape: tuple[int, ...]) -> None:
        self._computation, self._name = computation, name
        self.shape, self.names, self.is_quantized = shape, computation.names, False

    def tensor(self) -> Tensor:
        """See `Reading`."""
        return self._computation.take(self._name)

    def parts(self) -> list[Tensor | LayerWeight]:
        """See `Reading`."""
        return [self.tensor()]

    def slices(self) -> None:
        """See `Reading`."""
        return


def row_parts(reading: Reading) -> list[Tensor | LayerWeight]:
    """Return the parts of matrices [X, out, in] as rows: concatenated on dimension 0, they are [X * out, in]."""
    slices = reading.slices()
    if slices is not None:
        return [part for item in slices for part in item.parts()]
    return [part if isinstance(part, LayerWeight) else part.flatten(0, 1) for part in reading.parts()]


def values_of(part: Tensor | LayerWeight) -> Tensor:
    """Return the values of a stored tensor, of codes in float32."""
    if isinstance(part, Tensor):
        return part
    return StoredWeight((part.weight,), torch.float32, part.input_order).dequantize()


def _joined_shape(inputs: Sequence[Reading], dim: int) -> tuple[int, ...]:
    shapes = [reading.shape for reading in inputs]
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) != 1 or any(len(shape) <= dim for shape in shapes):
        raise CheckpointError(
            f"tensors like {shown(inputs[0].names[0])} belong together and must differ in dimension {dim} only, got "
            f"the shapes {', '.join(str(list(shape)) for shape in shapes[:3])}"
        )
    return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
