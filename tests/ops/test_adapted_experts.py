"""What adapters add to the experts of a layer, in one call, beside a plain loop over rows."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quire.ops.interface.adapted_experts import ExpertAdapters, group_pairs
from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.lora import LoraPart, LoraRows, LoraWeight
from quire.ops.interface.weight_memory import WeightMemory
from tests.ops.backends import CPU_BACKENDS, Backend
from tests.ops.world import randn

NUM_EXPERTS, WIDTH, NUM_COLUMNS = 6, 40, 72
Adapters = dict[int, dict[int, LoraWeight]]


def adapters_of(bounds: tuple[int, int]) -> Adapters:
    """Return adapters by slot: of all experts, of the gates of some, of none that is here."""
    whole = range(*bounds)

    def weight(seed: int, rank: int, num_columns: int) -> LoraWeight:
        a, b = randn(rank, WIDTH, seed=seed) * 0.3, randn(num_columns, rank, seed=seed + 99)
        return LoraWeight(a, (LoraPart(b, 0, 0),))

    return {
        0: {idx: weight(idx, 4, NUM_COLUMNS) for idx in whole},
        3: {idx: weight(10 + idx, 7, NUM_COLUMNS // 2) for idx in whole if idx % 2},
        4: {},
    }


def row_by_row(x: Tensor, chosen: Tensor, slots: list[int | None], adapters: Adapters) -> dict[tuple[int, int], Tensor]:
    """Return what is added to each pair of a row and an expert that has an adapter: the twin."""
    added = {}
    for row, slot in enumerate(slots):
        for expert in chosen[row].tolist():
            weight = adapters.get(-1 if slot is None else slot, {}).get(expert)
            if weight is not None:
                ((b, _, _),) = weight.parts
                added[row, expert] = b @ (weight.a @ x[row])
    return added


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bounds", [(0, NUM_EXPERTS), (2, 5)], ids=str)
def test_pairs_of_all_experts_are_the_loop(backend: Backend, bounds: tuple[int, int]) -> None:
    adapters, generator = adapters_of(bounds), random.Random(3)
    step, memory = StepAdapters(), WeightMemory(1 << 20)
    experts = ExpertAdapters(backend.make().make_lora(NUM_COLUMNS), bounds, step)
    for slot, weights in adapters.items():
        experts.put(slot, experts.pack(weights, memory))
    for num_rows in (1, 2, 9, 40):
        slots = [generator.choice((None, 0, 3, 4, 7)) for _ in range(num_rows)]
        x = randn(num_rows, WIDTH, seed=num_rows)
        chosen = torch.stack([torch.randperm(NUM_EXPERTS)[:3] for _ in range(num_rows)])
        rows = LoraRows.of(slots, [1] * num_rows)
        step.begin(None if rows is None else (rows, rows))
        pairs = group_pairs(chosen, bounds, NUM_EXPERTS, experts.rows(num_rows))
        expected = row_by_row(x, chosen, slots, adapters)
        added = None if pairs.adapted is None else experts(x[pairs.places // 3], pairs.adapted)
        assert expected or added is None or not added.any()
        seen = []
        for idx, span in pairs.spans:
            for place in range(span.start, span.stop):
                row, expert = int(pairs.places[place]) // 3, idx + bounds[0]
                assert chosen[row, int(pairs.places[place]) % 3] == expert
                seen.append((row, expert))
                wanted = torch.zeros(NUM_COLUMNS)
                if (row, expert) in expected:
                    wanted[: len(expected[row, expert])] = expected[row, expert]
                if added is not None:
                    torch.testing.assert_close(added[place], wanted, rtol=1e-4, atol=1e-4)
        assert sorted(seen) == sorted(
            (row, expert)
            for row in range(num_rows)
            for expert in chosen[row].tolist()
            if bounds[0] <= expert < bounds[1]
        )


def test_an_emptied_slot_has_no_rows() -> None:
    step = StepAdapters()
    experts = ExpertAdapters(CPU_BACKENDS[0].values[0].make().make_lora(NUM_COLUMNS), (0, NUM_EXPERTS), step)
    experts.put(3, experts.pack(adapters_of((0, NUM_EXPERTS))[3], WeightMemory(1 << 20)))
    rows = LoraRows(2, {3: [1]})
    step.begin((rows, None))
    assert experts.rows(2) is rows
    experts.put(3, None)
    assert experts.rows(2) is None
    assert group_pairs(torch.tensor([[1, 0], [5, 1]]), (0, NUM_EXPERTS), NUM_EXPERTS, None).spans == [
        (0, slice(0, 1)),
        (1, slice(1, 3)),
        (5, slice(3, 4)),
    ]
