"""LoRA adapters of a linear layer: the interface of backends, and an implementation by torch operators.

The output of adapters is computed first and passed to the layer as its residual, so that the layer's packed weight
stays unchanged, and one matmul serves the rows of all adapters.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.ops.interface.weight_memory import WeightMemory

# Slot of rows whose adapters are known only on the device, as in captured steps: any layer may have a part in them.
ANY_SLOT: Final = -1


class LoraPart(NamedTuple):
    """The matrix B of an adapter for some columns of a layer.

    Args:
        b: [n, r], the adapter's scale included.
        first_rank: index of its first input among the outputs of A.
        first_column: index of its first output among the layer's.
    """

    b: Tensor
    first_rank: int
    first_column: int


class LoraWeight(NamedTuple):
    """An adapter's matrices of a layer.

    Args:
        a: [R, in], the matrices A of all parts, concatenated.
        parts: matrices B; they share no columns.
    """

    a: Tensor
    parts: tuple[LoraPart, ...]


class LoraRows:
    """The rows of a step that have an adapter, grouped by adapter.

    Args:
        num_rows: number of all rows of the step.
        by_slot: rows of each adapter, by the slot of the adapter.

    Attributes:
        slots: adapter slot of each group.
        starts: index of each group's first row in `rows`, then the end.
        rows: rows of all groups.
        call: number of groups and the addresses of `slots`, `starts` and `rows` (`LoraRows` in lora.h).
        placed: the rows in a backend's form on its device; None until the backend sets it.
    """

    __slots__ = ("call", "num_rows", "placed", "rows", "slots", "starts")

    def __init__(self, num_rows: int, by_slot: dict[int, list[int]]) -> None:
        starts = array("q", accumulate(map(len, by_slot.values()), initial=0))
        self._set(num_rows, array("q", by_slot), starts, array("q", (row for rows in by_slot.values() for row in rows)))

    def _set(self, num_rows: int, slots: array[int], starts: array[int], rows: array[int]) -> None:
        self.num_rows, self.slots, self.starts, self.rows = num_rows, slots, starts, rows
        self.call = array("q", (len(slots), *(part.buffer_info()[0] for part in (slots, starts, rows))))
        self.placed: Any | None = None

    @classmethod
    def of_groups(cls, num_rows: int, slots: array[int], starts: array[int], rows: array[int]) -> LoraRows:
        """Return rows that are already grouped; for the arguments, see the attributes."""
        made = cls.__new__(cls)
        made._set(num_rows, slots, starts, rows)
        return made

    @classmethod
    def of(cls, slots: Iterable[int | None], counts: Sequence[int]) -> LoraRows | None:
        """Return the rows of consecutive sequences that have an adapter; None if no row has one.

        Args:
            slots: adapter slot of each sequence, None for no adapter.
            counts: number of rows of each sequence.
        """
        by_slot: dict[int, list[int]] = {}
        row = 0
        for slot, count in zip(slots, counts, strict=True):
            if slot is not None and count:
                by_slot.setdefault(slot, []).extend(range(row, row + count))
            row += count
        return cls(row, by_slot) if by_slot else None


class LoraLayer(Protocol):
    """The adapters of one linear layer, by slot."""

    def pack(self, weight: LoraWeight, memory: WeightMemory) -> Any:
        """Return a weight in the layout of the backend; thread-safe.

        Args:
            weight: an adapter's matrices of the layer.
            memory: memory of the adapter, for a backend with its own layout.
        """

    def put(self, slot: int, packed: Any | None) -> None:
        """Set the adapter of a slot, None for none; called between two steps."""

    def has(self, slots: Sequence[int]) -> bool:
        """Return whether the adapter of any of the slots has a part in the layer."""

    def __call__(self, x: Tensor, rows: LoraRows, residual: Tensor | None) -> Tensor:
        """Return the output of adapters for `x` [T, in], plus the residual: [T, out], contiguous.

        A row gets `B @ (A @ x)` of its adapter. Both matmuls accumulate in float32; the first is rounded, the second
        after the residual is added. The sums do not depend on other rows.

        Args:
            x: rows of the step.
            rows: rows that have an adapter.
            residual: [T, out], contiguous; None for zeros.
        """


class TorchLoraLayer:
    """The adapters of one linear layer by torch operators."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._weights: dict[int, LoraWeight] = {}

    def pack(self, weight: LoraWeight, memory: WeightMemory) -> LoraWeight:  # noqa: ARG002 (laid out as it is)
        """Return the weight as it is."""
        return weight

    def put(self, slot: int, packed: Any | None) -> None:
        """Set the adapter of a slot."""
        self._weights.pop(slot, None)
        if packed is not None:
            self._weights[slot] = packed

    def has(self, slots: Sequence[int]) -> bool:
        """Return whether the adapter of any of the slots has a part in the layer."""
        return not self._weights.keys().isdisjoint(slots)

    def __call__(self, x: Tensor, rows: LoraRows, residual: Tensor | None) -> Tensor:
        """Multiply by the matrices A and B of one adapter after the other."""
        total = x.new_zeros((len(x), self._num_columns), dtype=torch.float32)
        if residual is not None:
            total += residual
        for group, slot in enumerate(rows.slots):
            weight = self._weights.get(slot)
            if weight is None:
                continue
            of_group = torch.tensor(rows.rows[rows.starts[group] : rows.starts[group + 1]], device=x.device)
            inner = (x[of_group].float() @ weight.a.float().T).to(x.dtype).float()
            for b, first_rank, first_column in weight.parts:
                num_columns, rank = b.shape
                added = inner[:, first_rank : first_rank + rank] @ b.float().T
                columns = slice(first_column, first_column + num_columns)
                total[:, columns].index_add_(0, of_group, added)
        return total.to(x.dtype)
