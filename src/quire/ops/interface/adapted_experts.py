"""The experts of a layer with the adapters of a step's rows.

Each pair of a row and one of its experts is one row of the experts' matmuls. Pairs are sorted by expert, and by adapter
within an expert, so that the adapters of a layer of all experts are one call of the backend, for which each combination
of an adapter and an expert is a slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.lora import LoraLayer, LoraRows, LoraWeight
from quire.ops.interface.weight_memory import WeightMemory


class ExpertAdapters:
    """The adapters of one linear layer of each expert.

    Args:
        layer: adapters in the layout of the backend.
        bounds: first expert of this rank, and the one after the last.
        step: adapters of the present step's rows.

    Attributes:
        layer, bounds, step: the arguments.
    """

    def __init__(self, layer: LoraLayer, bounds: tuple[int, int], step: StepAdapters) -> None:
        self.layer, self.bounds, self.step = layer, bounds, step
        self._num_experts = bounds[1] - bounds[0]
        self._slots: set[int] = set()

    def pack(self, weights: Mapping[int, LoraWeight], memory: WeightMemory) -> dict[int, Any]:
        """Return an adapter's weights in the layout of the backend, by expert; thread-safe."""
        return {idx: self.layer.pack(weight, memory) for idx, weight in sorted(weights.items())}

    def put(self, slot: int, packed: Mapping[int, Any] | None) -> None:
        """Set the adapter of a slot, or remove it (None); to be called between two steps."""
        if packed is None and slot not in self._slots:
            return
        for local_idx, idx in enumerate(range(*self.bounds)):
            self.layer.put(slot * self._num_experts + local_idx, None if packed is None else packed.get(idx))
        self._slots.discard(slot)
        if packed is not None:
            self._slots.add(slot)

    def rows(self, num_rows: int) -> LoraRows | None:
        """Return the step's rows with an adapter; None if no adapter has a part in this layer."""
        rows = self.step.rows(num_rows)
        return None if rows is None or self._slots.isdisjoint(rows.slots) else rows

    def __call__(self, x: Tensor, pairs: LoraRows) -> Tensor | None:
        """Return the output of the adapters for pairs, [P, in] to [P, out]; None if no adapter has a part here."""
        slots = {slot // self._num_experts for slot in pairs.slots}
        return None if self._slots.isdisjoint(slots) else self.layer(x, pairs, None)


class ExpertPairs(NamedTuple):
    """The pairs of rows and experts of a step, for the experts of this rank, sorted by expert.

    Args:
        places: int64 [P], index of each pair among all T * C: row * C + index of the choice.
        spans: experts with at least one row, each with the range of its pairs.
        adapted: pairs with an adapter, by adapter and expert; None if there are none.
    """

    places: Tensor
    spans: Sequence[tuple[int, slice]]
    adapted: LoraRows | None


def group_pairs(chosen: Tensor, bounds: tuple[int, int], num_experts: int, rows: LoraRows | None) -> ExpertPairs:
    """Group the pairs of rows and experts.

    Args:
        chosen: int64 [T, C], experts of each row.
        bounds: first expert of this rank, and the one after the last.
        num_experts: number of all experts.
        rows: rows with an adapter; None if there are none.
    """
    first, end = bounds
    flat = chosen.flatten()
    starts = [*accumulate(torch.bincount(flat, minlength=num_experts).tolist(), initial=0)]
    rank_slice = slice(starts[first], starts[end])
    spans = [
        (idx, slice(begin - rank_slice.start, stop - rank_slice.start))
        for idx, (begin, stop) in enumerate(pairwise(starts[first : end + 1]))
        if begin < stop
    ]
    if rows is None:
        return ExpertPairs(flat.argsort(stable=True)[rank_slice], spans, None)
    num_groups = len(rows.slots)
    groups = _groups_of_rows(rows, flat.device)
    keys = flat * (num_groups + 1) + groups.repeat_interleave(chosen.shape[1])
    keys, order = keys.sort(stable=True)
    return ExpertPairs(order[rank_slice], spans, _adapted_pairs(keys[rank_slice], rows, first, end - first))


def _groups_of_rows(rows: LoraRows, device: torch.device) -> Tensor:
    """Return the index of each row's group, [T]; for rows without an adapter, the number of groups."""
    groups = torch.full((rows.num_rows,), len(rows.slots))
    for idx, (start, end) in enumerate(pairwise(rows.starts)):
        groups[torch.tensor(rows.rows[start:end])] = idx
    return groups.to(device)


def _adapted_pairs(keys: Tensor, rows: LoraRows, first: int, num_local: int) -> LoraRows | None:
    """Return the pairs that have an adapter."""
    num_groups = len(rows.slots)
    slots, starts, places = array("q"), array("q", [0]), array("q")
    if not len(keys):
        return None
    bounds = [0, *((keys[1:] != keys[:-1]).nonzero().flatten() + 1).tolist(), len(keys)]
    firsts = keys[torch.tensor(bounds[:-1], device=keys.device)].tolist()
    for key, (start, end) in zip(firsts, pairwise(bounds), strict=True):
        expert, group = divmod(key, num_groups + 1)
        if group < num_groups:
            slots.append(rows.slots[group] * num_local + expert - first)
            places.extend(range(start, end))
            starts.append(len(places))
    return LoraRows.of_groups(len(keys), slots, starts, places) if slots else None
