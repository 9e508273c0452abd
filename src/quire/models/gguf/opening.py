"""A GGUF file as the parts of a checkpoint: configuration, and tensors by the family's names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.errors import CheckpointError, shown
from quire.models.gguf.architectures import TensorSource, read_architecture
from quire.models.gguf.block_types import BLOCK_TYPES, PLAIN_DTYPES
from quire.models.gguf.reader import GGUFFile, GGUFTensor
from quire.models.gguf.tensor_types import TENSOR_TYPES
from quire.models.tensors.stored_tensor import StoredTensor
from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight


class GGUFModel(NamedTuple):
    """The model of a GGUF file.

    Args:
        config: content of a `config.json`.
        tensors: tensors by the family's names; if the file divides a tensor, its parts by their own names.
        divided: names of the parts of each divided tensor, to be joined on dimension 0.
        fields: metadata by key.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    divided: Mapping[str, tuple[str, ...]]
    fields: Mapping[str, Any]


def open_gguf(path: Path) -> GGUFModel:
    """Read a file's header."""
    file = GGUFFile.open(path)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config, sources = read_architecture(file.fields, shapes, partial(_read_floats, file))
    tensors: dict[str, StoredTensor] = {}
    divided: dict[str, tuple[str, ...]] = {}
    for name, parts in sources.items():
        names = (name,) if len(parts) == 1 else tuple(f"{name} ({source.name})" for source in parts)
        tensors |= {
            part: stored_tensor(file.tensors[source.name], source) for part, source in zip(names, parts, strict=True)
        }
        if len(parts) > 1:
            divided[name] = names
    return GGUFModel({"dtype": _dtype(file), **config}, tensors, divided, file.fields)


def _read_floats(file: GGUFFile, name: str) -> list[float]:
    """Return the values of a small tensor."""
    tensor = file.tensors[name]
    dtype = PLAIN_DTYPES.get(tensor.type_id)
    if dtype is None:
        kind = TENSOR_TYPES[tensor.type_id].name
        raise CheckpointError(f"the tensor {shown(name)} must be of {', '.join(_PLAIN)}, got {kind}", field=name)
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.offset)
        return torch.frombuffer(bytearray(stream.read(tensor.num_bytes)), dtype=dtype).tolist()


_PLAIN = tuple(TENSOR_TYPES[type_id].name for type_id in PLAIN_DTYPES)


def _dtype(file: GGUFFile) -> str:
    """Return the dtype of most bytes of matrices; bfloat16 if these are quantised."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            name = TENSOR_TYPES[tensor.type_id].name
            sizes[name] = sizes.get(name, 0) + tensor.num_bytes
    most = max(sizes, key=lambda name: sizes[name], default="")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def stored_tensor(tensor: GGUFTensor, source: TensorSource) -> StoredTensor:
    """Return a tensor of the family: its place in the file, and the function that decodes its bytes."""
    offset, num_bytes, shape = tensor.offset, tensor.num_bytes, tensor.shape
    if source.rows is not None:
        row_bytes = num_bytes // shape[0]
        num_bytes, shape = source.rows.num_rows * row_bytes, (source.rows.num_rows, *shape[1:])
        offset += source.rows.start * row_bytes
    if source.expert is not None:
        num_bytes, shape = num_bytes // shape[0], shape[1:]
        offset += source.expert * num_bytes
    decode = partial(_decode, tensor.type_id, shape, source)
    return StoredTensor(tensor.path, TENSOR_TYPES[tensor.type_id].name, source.shape, offset, num_bytes, decode)


def _decode(type_id: int, shape: tuple[int, ...], source: TensorSource, data: Tensor) -> Tensor | QuantizedWeight:
    """Return the values of a tensor in the order of the family, from its bytes.

    A quantised weight is dequantised if its columns have another order, because groups of columns share a scale, and if
    it has a transform or another shape in the family, because it is not the weight of a linear layer then.
    """
    dtype = PLAIN_DTYPES.get(type_id)
    values: Tensor | None = None
    if dtype is not None:
        values = (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype).view(shape)
    else:
        block, raw = BLOCK_TYPES[type_id], data.view(prod(shape[:-1]), -1)

        def read(rows: slice | Tensor) -> QuantizedRows:
            return block.unpack(raw[rows])

        weight = QuantizedWeight(block.form, (len(raw), shape[-1]), read, data.nbytes, block.stored(raw))
        if source.column_order is None and source.transform is None and source.shape == weight.shape:
            return weight if source.row_order is None else weight.rows(torch.tensor(source.row_order.indices()))
        values = weight.dequantize().view(shape)
    if source.row_order is not None:
        values = values[source.row_order.indices()]
    if source.column_order is not None:
        values = values[:, source.column_order.indices()]
    if source.transform == "minus_one":
        values = values.float() - 1.0
    elif source.transform == "log_negated":
        values = values.float().neg().log()
    return values.reshape(source.shape)
