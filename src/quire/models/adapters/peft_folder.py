"""A folder as PEFT writes it: an adapter's configuration and the two matrices of each of its modules."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from quire.bounded.files import read_file
from quire.errors import CheckpointError, shown
from quire.models.adapters.peft_config import CONFIG_FILE, PeftConfig
from quire.models.checkpoint import read_object

TENSORS_FILE: Final = "adapter_model.safetensors"
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
# The header of a file, which is read besides its matrices.
MAX_HEADER_BYTES: Final = 8 << 20
_MATRIX = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
# Parts of names that say where in a model of several parts the language model lies.
_OUTER = frozenset({"base_model", "model", "language_model"})


class ModuleShape(NamedTuple):
    """The widths of a linear layer that takes adapters."""

    in_width: int
    out_width: int


class Matrices(NamedTuple):
    """An adapter's matrices of one module, of their stored dtypes.

    Args:
        a: [r, in].
        b: [out, r].
        scale: factor of their product.
    """

    a: Tensor
    b: Tensor
    scale: float


class PeftAdapter(NamedTuple):
    """An adapter that was read and checked.

    Args:
        digest: digest of all that it computes.
        matrices: matrices by the name of the module, as `module_key` returns it.
    """

    digest: str
    matrices: dict[str, Matrices]


def module_key(name: str) -> str:
    """Return a module's name within the language model: checkpoints and models in memory differ in what is before."""
    parts = name.split(".")
    start = next((idx for idx, part in enumerate(parts) if part not in _OUTER), 0)
    return ".".join(parts[start:])


def read_peft(folder: Path, shapes: Mapping[str, ModuleShape], max_rank: int) -> PeftAdapter:
    """Read an adapter.

    Args:
        folder: folder of the two files.
        shapes: widths of the modules that take adapters, by `module_key`.
        max_rank: largest rank that is accepted.

    Raises:
        CheckpointError: a file is missing or damaged, the adapter asks for something that is not implemented, or it
            does not fit the model; the message names the file, and the field or the tensor.
    """
    if not folder.is_dir():
        raise CheckpointError(f"the adapter {folder} is no folder; one with {CONFIG_FILE} and {TENSORS_FILE} is needed")
    config = PeftConfig(read_object(folder / CONFIG_FILE), folder / CONFIG_FILE)
    path = folder / TENSORS_FILE
    pairs = _pairs(path, _tensors(path, shapes, max_rank), shapes)
    scales = config.scales(list(pairs))
    matrices: dict[str, Matrices] = {}
    digest = blake2b(digest_size=16)
    for module, (a, b) in sorted(pairs.items()):
        rank, scale = scales[module]
        _check_shapes(path, module, a, b, shapes[module_key(module)], rank)
        if rank > max_rank:
            raise CheckpointError(
                f"{path}: the adapter has rank {rank} in {shown(module)}, above max_lora_rank, which is {max_rank}",
                field="max_lora_rank",
            )
        for name, tensor in (("A", a), ("B", b)):
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{path}: lora_{name} of {shown(module)} holds values that are no finite numbers")
            digest.update(repr((module_key(module), name, tensor.dtype, tuple(tensor.shape), scale)).encode())
            whole = tensor.contiguous()
            digest.update((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))
        if module_key(module) in matrices:
            raise CheckpointError(f"{path} has two adapters for the module {shown(module)}")
        matrices[module_key(module)] = Matrices(a, b, scale)
    return PeftAdapter(digest.hexdigest(), matrices)


def _tensors(path: Path, shapes: Mapping[str, ModuleShape], max_rank: int) -> dict[str, Tensor]:
    """Return the tensors of a file, which is no longer than the largest adapter of the model."""
    most = 4 * max_rank * sum(each.in_width + each.out_width for each in shapes.values()) + MAX_HEADER_BYTES
    try:
        return load(read_file(path, most))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; adapters are read from safetensors files only") from None
    except OSError as error:
        reason = f"{error.strerror} ({max_rank=}; see max_lora_rank)"
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    # A dtype that torch lacks raises a key error.
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _pairs(
    path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, ModuleShape]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the two matrices of each module, by the module's name in the file.

    Raises:
        CheckpointError: a tensor is no such matrix, or is for something that takes no adapter.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _MATRIX.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{path} holds tensor {shown(name)}, which is not lora_A.weight or lora_B.weight of a module"
            )
        if module_key(match["module"]) not in shapes:
            raise CheckpointError(
                f"{path} has an adapter for {shown(match['module'])}, which is no linear layer of the model's layers "
                "that takes adapters (embeddings, the output head and single experts take none)",
                field="target_modules",
            )
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{path} holds tensor {shown(name)} as {tensor.dtype}; use float32 or 16 bits")
        found.setdefault(match["module"], {})[match["which"]] = tensor
    if not found:
        raise CheckpointError(f"{path} has no adapter for any module")
    for module, pair in found.items():
        if len(pair) != 2:
            raise CheckpointError(f"{path} has only lora_{next(iter(pair))} of the module {shown(module)}")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _check_shapes(path: Path, module: str, a: Tensor, b: Tensor, shape: ModuleShape, rank: int) -> None:
    for name, tensor, wanted in (("A", a, (rank, shape.in_width)), ("B", b, (shape.out_width, rank))):
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(
                f"{path}: lora_{name} of {shown(module)} must be of shape {list(wanted)}, got {list(tensor.shape)}"
            )
