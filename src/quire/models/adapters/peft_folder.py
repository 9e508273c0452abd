"""A folder in PEFT's format: an adapter's configuration and two matrices for each of its modules."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from quire.errors import CheckpointError, shown
from quire.models.adapters.expert_layers import (
    AdaptedExperts,
    ExpertLayer,
    ExpertLayers,
    ExpertMatrices,
    LinearPlace,
    is_first_of_inputs,
    parameter_name,
    split_by_expert,
)
from quire.models.adapters.names import module_key
from quire.models.adapters.peft_config import CONFIG_FILE, PeftConfig
from quire.models.checkpoints.checkpoint import read_object
from quire.models.checkpoints.safetensors_header import check_num_tensors, header_of
from quire.platform.bounded.files import read_file, reason_of

TENSORS_FILE: Final = "adapter_model.safetensors"
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
# Limits of a file's bytes besides its matrices: for the header, and for each linear layer of single experts.
MAX_HEADER_BYTES: Final = 8 << 20
HEADER_BYTES_OF_EXPERT: Final = 1 << 10
# Tensors of a file beyond those for every module, so that the first one that fits none is named.
SPARE_TENSORS: Final = 1 << 10
_MATRIX = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")


class ModuleShape(NamedTuple):
    """The widths of a linear layer that takes adapters."""

    in_width: int
    out_width: int


class Matrices(NamedTuple):
    """An adapter's matrices for one module, in their stored dtypes.

    Args:
        a: [r, in].
        b: [out, r].
        scale: factor of their product.
    """

    a: Tensor
    b: Tensor
    scale: float


class PeftAdapter(NamedTuple):
    """A checked adapter.

    Args:
        digest: digest of everything that determines its results.
        matrices: matrices by the `module_key` of the module.
        experts: matrices of single experts.
    """

    digest: str
    matrices: dict[str, Matrices]
    experts: AdaptedExperts


# The target of two matrices: a linear layer, a linear layer of one expert, or one of all experts.
_Target = ModuleShape | LinearPlace | ExpertLayer
_Pair = tuple[Tensor, Tensor]


def read_peft(folder: Path, shapes: Mapping[str, ModuleShape], experts: ExpertLayers, max_rank: int) -> PeftAdapter:
    """Read an adapter.

    Args:
        folder: folder of the two files.
        shapes: widths of the modules that take adapters, by `module_key`.
        experts: layers of single experts.
        max_rank: largest rank that is accepted.

    Raises:
        CheckpointError: a file is missing or damaged, the adapter asks for something that is not implemented, or it
            does not fit the model; the message names the file, and the field or the tensor.
    """
    _check_folder(folder)
    config = PeftConfig(read_object(folder / CONFIG_FILE), folder / CONFIG_FILE)
    path = folder / TENSORS_FILE
    pairs = _pairs(path, _tensors(path, shapes, experts, max_rank), shapes, experts)
    targets = {module: _target(path, module, pair, shapes, experts) for module, pair in pairs.items()}
    parameters = {
        module: parameter_name(module, target) for module, target in targets.items() if isinstance(target, ExpertLayer)
    }
    scales = config.scales(list(pairs), parameters)
    matrices: dict[str, Matrices] = {}
    of_experts: AdaptedExperts = {}
    digest = blake2b(digest_size=16)
    for module, (a, b) in sorted(pairs.items()):
        rank, scale = scales[module]
        target, key = targets[module], module_key(module)
        is_straight = _check(path, module, (a, b), target, rank, config.version)
        if rank > max_rank:
            raise CheckpointError(
                f"{path}: the adapter has rank {rank} in {shown(module)}, above max_lora_rank, which is {max_rank}",
                field="max_lora_rank",
            )
        for name, tensor in (("A", a), ("B", b)):
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{path}: lora_{name} of {shown(module)} holds values that are no finite numbers")
            identity = (target.weight, is_straight) if isinstance(target, ExpertLayer) else key
            digest.update(repr((identity, name, tensor.dtype, tuple(tensor.shape), scale)).encode())
            whole = tensor.contiguous()
            digest.update((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))
        is_new = True
        if isinstance(target, ExpertLayer):
            split = split_by_expert(target, a, b, scale, is_straight=is_straight)
            is_new = all(_add(of_experts, target, idx, part) for idx, part in split.items())
        elif isinstance(target, LinearPlace):
            is_new = _add(of_experts, target.layer, target.expert, ExpertMatrices(target.first_row, a, b, scale))
        else:
            is_new = key not in matrices
            matrices[key] = Matrices(a, b, scale)
        if not is_new:
            raise CheckpointError(f"{path} has two adapters for the module {shown(module)}")
    return PeftAdapter(digest.hexdigest(), matrices, of_experts)


def _check_folder(folder: Path) -> None:
    """Check that the folder of an adapter exists, and may be entered."""
    where = shown(str(folder))
    try:
        os.stat(os.path.join(folder, "."))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"the adapter {where} is no folder; one with {CONFIG_FILE} and {TENSORS_FILE} is needed"
        ) from None
    except (OSError, ValueError) as error:  # a name that is too long; a null character
        raise CheckpointError(f"the adapter {where} cannot be read: {reason_of(error)}") from error


def _tensors(path: Path, shapes: Mapping[str, ModuleShape], experts: ExpertLayers, max_rank: int) -> dict[str, Tensor]:
    """Return the tensors of a file, which may not be larger than the largest adapter for the model."""
    values = sum(shape.in_width + shape.out_width for shape in shapes.values()) + experts.num_values_per_rank
    most = 4 * max_rank * values + MAX_HEADER_BYTES + HEADER_BYTES_OF_EXPERT * experts.num_linears
    try:
        content = read_file(path, most)
        check_num_tensors(header_of(content), 2 * (len(shapes) + experts.num_linears) + SPARE_TENSORS)
        return load(content)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; adapters are read from safetensors files only") from None
    except OSError as error:
        reason = f"{error.strerror} ({max_rank=}; see max_lora_rank)"
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    # A dtype that torch lacks raises KeyError.
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _pairs(
    path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, ModuleShape], experts: ExpertLayers
) -> dict[str, _Pair]:
    """Return the two matrices of each module, by the module's name in the file."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _MATRIX.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{path} holds tensor {shown(name)}, which is not lora_A.weight or lora_B.weight of a module"
            )
        key = module_key(match["module"])
        if not (key in shapes or experts.linear(key) or experts.parameters(key)):
            raise CheckpointError(
                f"{path} has an adapter for {shown(match['module'])}, which is no linear layer of the model's layers, "
                "or of an expert, that takes adapters (embeddings and the output head take none)",
                field="target_modules",
            )
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{path} holds tensor {shown(name)} as {tensor.dtype}; use float32 or 16 bits")
        if tensor.dim() != 2:
            raise CheckpointError(f"{path}: tensor {shown(name)} must be a matrix, got the shape {list(tensor.shape)}")
        pairs.setdefault(match["module"], {})[match["which"]] = tensor
    if not pairs:
        raise CheckpointError(f"{path} has no adapter for any module")
    for module, pair in pairs.items():
        if len(pair) != 2:
            raise CheckpointError(f"{path} has only lora_{next(iter(pair))} of the module {shown(module)}")
    return {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}


def _target(path: Path, module: str, pair: _Pair, shapes: Mapping[str, ModuleShape], experts: ExpertLayers) -> _Target:
    """Return the target of the two matrices of a module."""
    key = module_key(module)
    linear = shapes.get(key) or experts.linear(key)
    if linear is not None:
        return linear
    of_all = experts.parameters(key)
    a, b = pair
    # Widths identify the parameter; the order of PEFT's wrappers does not matter.
    widths = {a.shape[-1], b.shape[0]} if a.dim() == b.dim() == 2 else set()
    for layer in of_all:
        if widths == {layer.in_width, layer.out_width}:
            return layer
    wanted = " or ".join(
        f"{candidate.in_width} and {candidate.out_width} ({candidate.parameter})" for candidate in of_all
    )
    raise CheckpointError(
        f"{path}: lora_A and lora_B of {shown(module)} must have the widths {wanted}, got the shapes {list(a.shape)} "
        f"and {list(b.shape)}",
        field="target_parameters",
    )


def _check(path: Path, module: str, pair: _Pair, target: _Target, rank: int, version: tuple[int, ...] | None) -> bool:
    """Check the shapes of two matrices, and return whether the first one multiplies the layer's inputs."""
    a, b = pair
    is_straight: bool | None = True
    num_ranks, in_width, out_width = rank, a.shape[-1], b.shape[0]
    if isinstance(target, ExpertLayer):
        num_ranks = rank * target.num_experts
        is_straight = is_first_of_inputs(target, in_width, version)
    elif isinstance(target, LinearPlace):
        in_width, out_width = target.layer.in_width, target.num_rows
    else:
        in_width, out_width = target
    for name, tensor, wanted in (("A", a, (num_ranks, in_width)), ("B", b, (out_width, num_ranks))):
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(
                f"{path}: lora_{name} of {shown(module)} must be of shape {list(wanted)}, got {list(tensor.shape)}"
            )
    if is_straight is None:
        raise CheckpointError(
            f"{path}: peft_version must say which of the matrices of {shown(module)} multiplies the inputs, as both "
            f"have the width {in_width}: PEFT 0.19.1 and later have another order than before",
            field="peft_version",
        )
    return is_straight


def _add(experts: AdaptedExperts, layer: ExpertLayer, expert: int, matrices: ExpertMatrices) -> bool:
    """Add matrices for some rows of an expert; return whether these rows had none before."""
    of_expert = experts.setdefault(layer.weight, {}).setdefault(expert, [])
    first, end = matrices.first_row, matrices.first_row + len(matrices.b)
    is_new = all(end <= other.first_row or other.first_row + len(other.b) <= first for other in of_expert)
    of_expert.append(matrices)
    return is_new
