"""The adapters of a decoder, each in a slot, and the layers that take adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.adapters.expert_layers import DOWN, ExpertLayer, ExpertLayers, ExpertMatrices
from quire.models.adapters.memory import AdapterMemory, MemoryClaim
from quire.models.adapters.names import module_key
from quire.models.adapters.peft_folder import Matrices, ModuleShape, read_peft
from quire.models.checkpoints.tensor_reader import WEIGHT
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.weight_slots import AdaptedRows
from quire.models.specs.sharding import Range, Split
from quire.models.specs.spec import WeightMap
from quire.ops.interface.adapted_experts import ExpertAdapters
from quire.ops.interface.adapted_linear import AdaptedLinear
from quire.ops.interface.lora import LoraPart, LoraWeight
from quire.ops.interface.weight_memory import WeightMemory

# The output head takes no adapters, since its inputs are not the rows of a step.
HEAD = "head."
# An adapter of rank 16 for a model of a billion parameters takes 20 to 50 MB.
ADAPTER_SLAB_BYTES = 32 << 20


class Place(NamedTuple):
    """The part of a decoder's linear layer that belongs to a module of the checkpoint.

    Args:
        linear_idx: index of the layer.
        first_column: index of the module's first output in the layer.
        rows: int64 [n], the module's output for each output of the layer from `first_column` on; None for all in order.
        inputs: range of the module's inputs that the layer has; None for all.
    """

    linear_idx: int
    first_column: int
    rows: Tensor | None
    inputs: Range | None = None


# The matrices of one layer with their places.
Parts: TypeAlias = list[tuple[Matrices, Place]]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Adapter:
    """An adapter in the layout of the kernels.

    Args:
        digest: digest of everything that determines its results.
        packed: matrices by the index of their linear layer.
        experts: matrices of single experts, by the name of their layer's weight in the whole model, and by expert.
        folder: the adapter's folder.
    """

    digest: str
    packed: dict[int, Any]
    experts: dict[str, dict[int, Any]]
    folder: Path


class _AdaptedExperts(NamedTuple):
    """A layer of all experts in a decoder.

    Args:
        layer: the layer in the whole model.
        adapters: adapters of the layer.
        columns: gated columns of each expert that this rank has; None for all.
    """

    layer: ExpertLayer
    adapters: ExpertAdapters
    columns: Range | None


class AdapterSlots:
    """The adapters of a decoder.

    Each linear layer that takes adapters is wrapped after all weights are loaded and layers are fused: steps without
    adapters still run the fused layers from before, at no extra cost. On a rank, matrices are split like the weights of
    layers: B if a layer is split by outputs, A if it is split by inputs. On a stage, matrices of other stages are read
    and checked, but not stored.

    Args:
        decoder: decoder with all its weights.
        weight_map: parameter name -> names of the family's tensors.
        row_count: function from the name of a tensor of the family to its number of rows.
        max_rank: largest rank of an adapter.
        experts: layers of single experts of the whole model.
        modules: widths of the modules of the whole model that take adapters, by `module_key`.
        splits: parts of weights that the decoder has; other weights are whole. None for no parts.
        own_name: function from the name of a weight in the whole model to its name in the decoder.

    Attributes:
        memory: memory of the adapters.
    """

    def __init__(
        self,
        decoder: CausalModel,
        weight_map: WeightMap,
        row_count: Callable[[str], int],
        max_rank: int,
        experts: ExpertLayers,
        modules: Mapping[str, ModuleShape],
        splits: Mapping[str, Split] | None = None,
        *,
        own_name: Callable[[str], str] = lambda name: name,
    ) -> None:
        self._dtype, self._device, self._max_rank = decoder.dtype, decoder.device, max_rank
        self.memory = AdapterMemory()
        self._read_ahead: dict[Path, Adapter] = {}
        self._in_slots: dict[int, Adapter] = {}  # keeps adapters alive, and so their memory claimed
        self._linears: list[AdaptedLinear] = []
        self._experts = experts
        self._adapted_experts = self._adapt_experts(decoder, splits or {}, own_name)
        self._places: dict[str, list[Place]] = {}
        self._shapes = modules
        for name, slot in decoder.weights.slots.items():
            if not slot.adapted or name.startswith(HEAD):
                continue
            linears = [self._wrap(decoder, adapted, len(weight_map[name])) for adapted in slot.adapted]
            split = None if splits is None else splits.get(name)
            inputs = split.ranges[0] if split is not None and split.dim == 1 else None
            start = 0
            for source in weight_map[name]:
                key, num_rows = module_key(source.removesuffix(WEIGHT)), row_count(source)
                places = self._places.setdefault(key, [])
                for linear_idx, (_, rows) in zip(linears, slot.adapted, strict=True):
                    places += _places(linear_idx, _whole_rows(rows, split), start, num_rows, inputs)
                start += num_rows
        decoder.step_adapters.can_be_static = bool(self._linears) and not self._adapted_experts
        decoder.fuse_adapted()

    def _adapt_experts(
        self, decoder: CausalModel, splits: Mapping[str, Split], own_name: Callable[[str], str]
    ) -> dict[str, _AdaptedExperts]:
        """Make layers of experts take adapters, and return them by the names of their weights in the whole model."""
        adapted = {}
        for name, layer in self._experts.layers.items():
            local_name = own_name(name)
            if local_name not in decoder.weights.slots:
                continue  # on another stage
            taker = decoder.weights.slots[local_name].experts
            assert taker is not None, "layers of experts take adapters"
            down = splits.get(local_name.replace(".gate_up.", ".down."))
            columns = down.ranges[0] if down is not None and down.dim == 1 else None
            adapted[name] = _AdaptedExperts(layer, taker.adapt(decoder.ops, decoder.step_adapters), columns)
        return adapted

    def _wrap(self, decoder: CausalModel, adapted: AdaptedRows, num_modules: int) -> int:
        """Wrap a linear layer, which joins `num_modules` modules, and return its index."""
        projection = adapted.projection
        layer = decoder.ops.make_lora(projection.slots["weight"].shape[0], num_modules * self._max_rank)
        projection.run = AdaptedLinear(projection.run, layer, decoder.step_adapters)
        self._linears.append(projection.run)
        return len(self._linears) - 1

    def read(self, folder: Path) -> Adapter:
        """Read an adapter, and pack it for the kernels; thread-safe, and may take long.

        Raises:
            CheckpointError: see `read_peft`, or there is no memory to pack it.
            OutOfAdapterMemory: a GPU has too little memory left.
        """
        adapter = self._read_ahead.pop(folder.absolute(), None)
        if adapter is not None:
            return adapter
        digest, matrices, of_experts = read_peft(folder, self._shapes, self._experts, self._max_rank)
        try:
            with self.memory.claim() as claim:
                packed, experts = self._pack(matrices, of_experts, claim)
        except (RuntimeError, MemoryError) as error:  # includes torch's errors of memory, on CPU and GPU
            reason = " ".join(str(error).split())[:200] or "out of memory"
            raise CheckpointError(
                f"{folder}: it cannot be laid out on {self._device} ({reason})", field="lora_path"
            ) from error
        adapter = Adapter(digest, packed, experts, folder)
        claim.end_with(adapter)
        return adapter

    def read_ahead(self, folders: Iterable[Path]) -> None:
        """Read adapters that `read` returns later, to take their memory before the rest of a GPU's is divided.

        Raises:
            CheckpointError: see `read`.
        """
        for folder in folders:
            self._read_ahead[folder.absolute()] = self.read(folder)

    def _pack(
        self,
        matrices: Mapping[str, Matrices],
        of_experts: Mapping[str, Mapping[int, list[ExpertMatrices]]],
        claim: MemoryClaim,
    ) -> tuple[dict[int, Any], dict[str, dict[int, Any]]]:
        """Pack an adapter for the kernels: by linear layer, and by layer of experts and expert."""
        parts: dict[int, Parts] = {}
        for module, pair in matrices.items():
            for place in self._places.get(module, ()):
                parts.setdefault(place.linear_idx, []).append((pair, place))
        of_layers = {
            name: _expert_parts(self._adapted_experts[name], of_experts[name])
            for name in of_experts
            if name in self._adapted_experts
        }
        all_parts = chain(parts.values(), *(by_expert.values() for by_expert in of_layers.values()))
        claim.take(sum(map(_count, all_parts)) * self._dtype.itemsize)
        memory = WeightMemory(ADAPTER_SLAB_BYTES)
        packed = {
            idx: self._linears[idx].layer.pack(self._weight(of_linear), memory)
            for idx, of_linear in sorted(parts.items())
        }
        experts = {
            name: self._adapted_experts[name].adapters.pack(
                {idx: self._weight(of_expert) for idx, of_expert in of_layer.items()}, memory
            )
            for name, of_layer in of_layers.items()
        }
        claim.settle(packed, experts)
        return packed, experts

    def _weight(self, parts: Parts) -> LoraWeight:
        """Join the matrices of a layer, in the dtype of its rows."""
        first_matrices: list[Tensor] = []
        second: list[LoraPart] = []
        first_rank = 0
        for (a, b, scale), (_, first_column, rows, inputs) in parts:
            scaled = (b.float() if rows is None else b[rows].float()) * scale
            first_matrices.append(self._placed(a if inputs is None else a[:, slice(*inputs)]))
            second.append(LoraPart(self._placed(scaled), first_rank, first_column))
            first_rank += len(a)
        return LoraWeight(torch.cat(first_matrices), tuple(second))

    def _placed(self, tensor: Tensor) -> Tensor:
        placed = tensor.to(self._device, self._dtype)
        if not bool(placed.isfinite().all()):
            raise CheckpointError(f"the adapter holds values that {self._dtype} cannot represent")
        return placed

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """Set or (None) clear the adapter of a slot, between two steps."""
        if adapter is None:
            self._in_slots.pop(slot, None)
        else:
            self._in_slots[slot] = adapter
        for idx, linear in enumerate(self._linears):
            linear.layer.put(slot, None if adapter is None else adapter.packed.get(idx))
        for name, adapted in self._adapted_experts.items():
            adapted.adapters.put(slot, None if adapter is None else adapter.experts.get(name))


def _expert_parts(adapted: _AdaptedExperts, of_experts: Mapping[int, list[ExpertMatrices]]) -> dict[int, Parts]:
    """Return an adapter's matrices for this rank's experts of a layer, by expert."""
    layer, adapters, columns = adapted
    rows = inputs = None
    if columns is not None and layer.parameter == DOWN:
        inputs = columns
    elif columns is not None:
        gates = torch.arange(*columns)
        rows = torch.cat([gates, gates + layer.out_width // 2])
    return {
        idx: [
            (Matrices(a, b, scale), place)
            for first_row, a, b, scale in sorted(parts, key=lambda part: part.first_row)
            for place in _places(0, rows, first_row, len(b), inputs)
        ]
        for idx, parts in of_experts.items()
        if adapters.bounds[0] <= idx < adapters.bounds[1]
    }


def _count(parts: Parts) -> int:
    """Return the number of elements of this rank's parts of matrices."""
    total = 0
    for (a, b, _), (_, _, rows, inputs) in parts:
        width = a.shape[1] if inputs is None else inputs[1] - inputs[0]
        total += len(a) * (width + (len(b) if rows is None else len(rows)))
    return total


def _whole_rows(rows: Tensor | None, split: Split | None) -> Tensor | None:
    """Convert rows of this rank's part of a weight, which a layer takes, to rows of the whole weight."""
    if split is None or split.dim != 0:
        return rows
    part_rows = torch.cat([torch.arange(*bounds) for bounds in split.ranges])
    return part_rows if rows is None else part_rows[rows]


def _places(
    linear_idx: int, rows: Tensor | None, start: int, num_rows: int, inputs: Range | None = None
) -> list[Place]:
    """Return the places of rows `[start, start + num_rows)` of a stored weight in a layer that takes its `rows`."""
    if rows is None:
        return [Place(linear_idx, start, None, inputs)]
    columns = ((rows >= start) & (rows < start + num_rows)).nonzero().flatten()
    if not len(columns):
        return []
    first = int(columns[0])
    assert int(columns[-1]) - first + 1 == len(columns), "rows of a module lie together"
    return [Place(linear_idx, first, rows[columns] - start, inputs)]
