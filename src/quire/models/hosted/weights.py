"""Loading of a checkpoint into a module of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from quire.errors import CheckpointError, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.finite_values import MOST_BROKEN_ROWS, check_finite, place_of
from quire.models.checkpoints.tensor_reader import WEIGHT, TensorReader, join_parts
from quire.models.hosted.conversions import read_conversions
from quire.models.hosted.linear import UNWATCHED, LayerUse
from quire.models.hosted.module_slots import ModuleSlots, Tied, is_turned
from quire.models.hosted.readings import Reading, row_parts
from quire.models.modules.weight_slots import WeightTable
from quire.ops.interface.ops import Ops

# Stored tensors that no module needs: scales of activations, keys and values, and what older versions of transformers
# stored although modules compute it.
HARMLESS: Final = (
    r"\.(input_scale|input_zero_point|activation_scale|[kvq]_scale|kv_scale|[kv]_zero_point)$",
    r"rotary_emb\.inv_freq$",
    r"(^|\.)position_ids$",
)


def fill(
    module: Any,
    checkpoint: Checkpoint,
    *,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    use: LayerUse = UNWATCHED,
) -> WeightTable:
    """Load a checkpoint into a module, and pack its linear layers, its output head and its experts.

    All names and shapes are checked before the first byte of a value is read, except that tensors which a module ties
    are compared where a checkpoint stores each.

    Args:
        module: causal language model of transformers, built under `dtype`, with its parameters on the meta device.
        checkpoint: the model's files.
        ops: kernels.
        dtype: dtype of the weights; those that the module keeps in float32 stay so, and are not packed.
        device: device of the kernels.
        use: use of the layers in a step, from `watch_layers`.

    Returns:
        The table of weights, all of them loaded; the weight of a layer that takes adapters has its name in the module.

    Raises:
        CheckpointError: a tensor is missing, is not part of the module, has a wrong shape or dtype, or values that are
            not finite; the message names it.
        UnsupportedModel: the module's tensors cannot be made of the stored ones.
    """
    reader = TensorReader(checkpoint)
    state: dict[str, Tensor] = module.state_dict()
    readings, unused = read_conversions(module, checkpoint, reader)
    _check_unused(module, state, unused, checkpoint)
    _check_shapes(module, state, readings, checkpoint)
    groups = [names for names in _tied(module, state, readings) if _is_stored(names, state, readings, checkpoint)]
    dtypes = _dtypes(module, state, dtype)
    embeddings = {f"{name}{WEIGHT}" for name, layer in module.named_modules() if isinstance(layer, nn.Embedding)}
    slots = ModuleSlots(module, groups, readings, dtypes, ops=ops, dtype=dtype, use=use).slots
    table = WeightTable(slots, dtype, device, lambda: None)
    for name, slot in slots.items():
        reading = readings[name]
        parts = row_parts(reading) if len(slot.shape) < len(reading.shape) else reading.parts()
        for part in parts:
            check_finite(checkpoint, reading.names[0], part, most=MOST_BROKEN_ROWS if name in embeddings else 0.0)
        table.load(name, join_parts(parts, slot.shape, table.dtype(name)))
        reader.let_go(reading.names)
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            layer._buffers[name] = None if buffer is None else buffer.to(device)
    return table


def _check_unused(module: Any, state: Mapping[str, Tensor], unused: Iterable[str], checkpoint: Checkpoint) -> None:
    """Refuse stored tensors that are not part of the module.

    Those that transformers ignores are ignored here, too, and buffers that the module computes and does not store.
    """
    patterns = (*(module._keys_to_ignore_on_load_unexpected or ()), *HARMLESS)
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    computed = {name for name, _ in module.named_buffers() if name not in state}
    computed |= {name.removeprefix(f"{module.base_model_prefix}.") for name in computed}
    surplus = sorted(name for name in unused if name not in computed and ignored.search(name) is None)
    if surplus:
        names = ", ".join(shown(name) for name in surplus[:4]) + (", ..." if len(surplus) > 4 else "")
        raise CheckpointError(
            f"the checkpoint in {checkpoint.folder} has {len(surplus)} tensors that are not part of "
            f"{type(module).__name__}: {names}"
        )


def _check_shapes(
    module: nn.Module, state: Mapping[str, Tensor], readings: Mapping[str, Reading], checkpoint: Checkpoint
) -> None:
    layers = dict(module.named_modules())
    for name, reading in readings.items():
        shape, owner = tuple(state[name].shape), layers[name.rpartition(".")[0]]
        wanted = (*shape[:-2], shape[-1], shape[-2]) if is_turned(owner, reading) else shape
        if reading.shape != wanted:
            raise CheckpointError(
                f"{place_of(checkpoint, reading.names[0])} holds tensor {shown(reading.names[0])}, which gives "
                f"{list(reading.shape)} and does not fit into {name} of shape {list(wanted)}"
            )


def _tied(module: Any, state: Mapping[str, Tensor], readings: Mapping[str, Reading]) -> Iterator[Tied]:
    """Yield the names of the module's tensors, those together that have one value; a stored one comes first.

    Like transformers, tensors that are said to be tied but are stored with different values are not tied.
    """
    groups = {name: [name] for name in state}
    pairs: Mapping[str, str] = module.all_tied_weights_keys
    for target, source in pairs.items():
        group, other = groups[source], groups[target]
        if group is not other:
            group += other
            groups.update(dict.fromkeys(other, group))
    for name, group in groups.items():
        if name != group[0]:
            continue
        first = next((tied for tied in group if tied in readings), name)
        own = {
            tied
            for tied in group
            if tied != first and tied in readings and not _are_equal(readings[first], readings[tied])
        }
        yield (first, *(tied for tied in group if tied != first and tied not in own))
        yield from ((tied,) for tied in own)


def _are_equal(first: Reading, second: Reading) -> bool:
    return first.shape == second.shape and torch.equal(first.tensor(), second.tensor())


def _is_stored(
    names: Tied, state: Mapping[str, Tensor], readings: Mapping[str, Reading], checkpoint: Checkpoint
) -> bool:
    """Return whether a value is stored; buffers that the module computes need not be."""
    if names[0] not in readings and state[names[0]].device.type == "meta":
        raise CheckpointError(f"the checkpoint in {checkpoint.folder} has no tensor for {shown(names[0])}")
    return names[0] in readings


def _dtypes(module: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor: as the module was built, or float32 where the module keeps it."""
    kept = set(module._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        kept |= set(module._keep_in_fp32_modules or ())
    pattern = re.compile("|".join(f"(?:{name.replace('*', '.*')})" for name in sorted(kept))) if kept else None
    return {
        name: torch.float32 if pattern is not None and pattern.search(name) else tensor.dtype
        for name, tensor in state.items()
    }
