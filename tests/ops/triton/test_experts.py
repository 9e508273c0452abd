"""Triton's experts, interpreted, give what the block gives by operators."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from quire.models.experts import ExpertsBlock
from quire.models.norms import Norm
from quire.models.projections import ResidualAdd
from quire.models.spec import Experts
from tests.ops.test_native_experts import OPTIONS
from tests.ops.triton.interpreted import MARKS, make_ops
from tests.ops.world import REFERENCE, assert_near, randn

from quire.ops.triton.routed_experts import FEW_ROWS, MANY_ROWS, TritonExperts, group_rows  # isort: skip

pytestmark = MARKS
WIDTH, INNER, NUM_EXPERTS, NUM_CHOSEN = 96, 48, 5, 2
ALL_OPTIONS: dict[str, dict[str, Any]] = OPTIONS | {"transposed": {"transposed": True, "scoring": "sigmoid"}}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_block(ops: Any, options: dict[str, Any], dtype: torch.dtype) -> Any:
    new_norm = partial(Norm, width=WIDTH, ops=ops, dtype=dtype, device=CPU)
    block = ExpertsBlock(Experts(NUM_EXPERTS, NUM_CHOSEN, INNER, **options), WIDTH, ResidualAdd(), ops, new_norm)
    for seed, (_, slot) in enumerate(block.slots.items()):
        weight = randn(*slot.shape, seed=seed)
        slot.fill((weight * slot.shape[-1] ** -0.5 if weight.dim() > 1 else weight).to(slot.dtype or dtype))
    return block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_experts(name: str, dtype: torch.dtype) -> None:
    ops = make_ops()
    block, twin = (make_block(each, ALL_OPTIONS[name], dtype) for each in (ops, REFERENCE))
    block.fuse(ops)
    assert isinstance(block.fused, TritonExperts)
    x = randn(40, WIDTH, dtype=dtype, seed=99)
    start = randn(40, WIDTH, dtype=dtype, seed=98)
    for num_rows in (1, 40):
        assert_near(block(x[:num_rows], start[:num_rows]), twin(x[:num_rows], start[:num_rows]), factor=4)
    assert_near(block.mix(x[:3]), twin.mix(x[:3]), factor=4)


@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_groups_hold_each_row_once_for_each_of_its_experts(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    chosen = torch.rand(num_rows, 9, generator=generator).topk(3).indices
    groups = group_rows(chosen, torch.rand(num_rows, 3, generator=generator), 9)
    assert groups.tile_rows == (MANY_ROWS if num_rows == 300 else FEW_ROWS)
    found = []
    for expert, first, end in groups.tiles.T.tolist():
        if expert < 9:
            found += [
                (int(groups.row_ids[place]), expert) for place in range(first, min(first + groups.tile_rows, end))
            ]
    assert sorted(found) == sorted((row, expert) for row in range(num_rows) for expert in chosen[row].tolist())
    assert torch.equal(groups.row_ids[groups.places], torch.arange(num_rows).int()[:, None].expand(-1, 3))
