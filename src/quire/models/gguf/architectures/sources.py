"""The sources of a family's tensors in a GGUF file, and the inverse of the converter's changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final, Literal, NamedTuple

from quire.errors import CheckpointError, shown
from quire.models.gguf.architectures.metadata import Metadata

Config = dict[str, Any]
# Name of a tensor in the file -> its shape, rows first.
Shapes = Mapping[str, tuple[int, ...]]
# Function that reads the values of a vector of the file by its name.
Floats = Callable[[str], list[float]]
Transform = Literal["minus_one", "log_negated"]

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"(?<=\.experts\.)(\d+)\.")


class AxisSwap(NamedTuple):
    """An order of rows or columns: from `start` on, they are stored as [blocks, first, second, width].

    The family has them as [blocks, second, first, width]; rows or columns before `start` stay in place.
    """

    start: int
    blocks: int
    first: int
    second: int
    width: int

    @property
    def size(self) -> int:
        """Number of rows or columns."""
        return self.start + self.blocks * self.first * self.second * self.width

    def indices(self) -> list[int]:
        """Return the stored index of each row or column of the family."""
        return list(range(self.start)) + [
            self.start + ((block * self.first + first) * self.second + second) * self.width + offset
            for block in range(self.blocks)
            for second in range(self.second)
            for first in range(self.first)
            for offset in range(self.width)
        ]


class Change(NamedTuple):
    """The inverse of a converter's change of a tensor.

    Args:
        row_order, column_order: order in which rows or columns are taken; None for the stored one.
        transform: function of the values: minus one, or the logarithm of the negated values; None for none.
        layout: reshape to one dimension, or insertion of a dimension of size 1 at index 0 or 1; None for the stored
            shape.
    """

    row_order: AxisSwap | None = None
    column_order: AxisSwap | None = None
    transform: Transform | None = None
    layout: Literal["flatten", "unsqueeze_0", "unsqueeze_1"] | None = None


class RowRange(NamedTuple):
    """Rows of a file's tensor that are a separate tensor in the family.

    Args:
        name: name of the tensor in the file.
        start: first row.
        num_rows: number of rows.
    """

    name: str
    start: int
    num_rows: int


class TensorSource(NamedTuple):
    """The source of a family's tensor: a tensor of the file, and changes in the order of these fields.

    Args:
        name: name in the file.
        rows: range of rows that is read; None for all.
        expert: index in a stack of experts; None for other tensors.
        row_order: order in which the stored rows are taken; None for the stored one.
        column_order: order in which the stored columns are taken; None for the stored one.
        transform: function of the values, for tensors that are never quantised.
        shape: shape in the family, of the same elements in the same order.
    """

    name: str
    rows: RowRange | None
    expert: int | None
    row_order: AxisSwap | None
    column_order: AxisSwap | None
    transform: Transform | None
    shape: tuple[int, ...]


def no_changes(_config: Config) -> Mapping[str, Change]:
    """Return no changes."""
    return {}


def same_name(_config: Config, name: str) -> str:
    """Return the name."""
    return name


class Architecture(NamedTuple):
    """An architecture of GGUF files.

    Args:
        read_config: function that returns a configuration in the format of Hugging Face.
        layer: names of a layer's modules and tensors, the family's -> the file's; rows of several are joined.
        ends: names of tensors outside of layers, the family's -> the file's.
        changes: function from the configuration to the changes of tensors, by the family's names (in layers).
        renamed: function from the configuration and a name in the family to its name in `layer` and `ends`.
    """

    read_config: Callable[[Metadata, Shapes, Floats | None], Config]
    layer: Mapping[str, str | tuple[str, ...]]
    ends: Mapping[str, str]
    changes: Callable[[Config], Mapping[str, Change]] = no_changes
    renamed: Callable[[Config, str], str] = same_name


def find_sources(
    architecture: Architecture,
    changes: Mapping[str, Change],
    name: str,
    shapes: Shapes,
    ranges: Mapping[str, RowRange],
) -> tuple[TensorSource, ...]:
    """Return the tensors of a file that are joined on dimension 0 to a tensor of the family."""
    match = _LAYER.fullmatch(name)
    numbered = _EXPERT.search(name)
    expert = None if numbered is None else int(numbered[1])
    if match is None:
        stored = name if numbered is None else name.replace(f".experts.{numbered[1]}.", ".")
        stored = architecture.ends.get(stored, stored)
        return (_source(stored, None, expert, changes.get(name, Change()), name, shapes.get(stored)),)
    inner = match[2] if numbered is None else _EXPERT.sub("", match[2])
    stems, kind = architecture.layer.get(inner), ""
    if stems is None:
        module, _, kind = inner.rpartition(".")
        stems, kind = architecture.layer.get(module, module), f".{kind}"
    change = changes.get(inner, Change())
    names = [f"blk.{match[1]}.{stem}{kind}" for stem in ((stems,) if isinstance(stems, str) else stems)]
    return tuple(
        _source(tensor_name, ranges.get(tensor_name), expert, change, name, shapes.get(tensor_name))
        for tensor_name in names
    )


def _source(
    stored: str, rows: RowRange | None, expert: int | None, change: Change, name: str, shape: tuple[int, ...] | None
) -> TensorSource:
    if rows is not None and shape is not None:
        stored, shape = rows.name, (rows.num_rows, *shape[1:])
    if shape is None:
        raise CheckpointError(f"the file has no tensor {shown(stored)} (for {name})", field=stored)
    wrong = CheckpointError(f"the tensor {shown(stored)} has shape {list(shape)}, which is none for {name}")
    if expert is not None:
        if not 2 <= len(shape) <= 3 or expert >= shape[0]:
            raise wrong
        shape = shape[1:]
    elif len(shape) == 3:  # all experts of a layer are read as [X * out, in]
        shape = (shape[0] * shape[1], shape[2])
    for order, dim in ((change.row_order, 0), (change.column_order, 1)):
        if order is not None and (len(shape) <= dim or shape[dim] != order.size):
            raise wrong
    if change.layout == "flatten":
        shape = (prod(shape),)
    elif change.layout == "unsqueeze_0":
        shape = (1, *shape)
    elif change.layout == "unsqueeze_1":
        shape = (*shape[:1], 1, *shape[1:])
    return TensorSource(stored, rows, expert, change.row_order, change.column_order, change.transform, shape)
