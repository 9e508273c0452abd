"""Triton's experts, interpreted or on a GPU, give what the block gives by the slow twin, which is on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.models.modules.experts import ExpertsBlock
from quire.models.modules.norms import Norm
from quire.models.modules.projections import ResidualAdd
from quire.models.specs.spec import Experts
from quire.ops.interface.quantized_weight import PlainWeight, QuantizedWeight, StoredWeight, WeightForm
from quire.ops.reference.reference_ops import ReferenceOps
from tests.ops.test_native_experts import OPTIONS
from tests.ops.test_quantised_linear import assert_same_numbers
from tests.ops.test_quantized_weights import FLOAT8, FORMS, random_weight
from tests.ops.triton.device import DEVICE, MARKS, make_ops
from tests.ops.triton.test_stored_linear import assert_groups_apart
from tests.ops.world import REFERENCE, assert_near, randn

from quire.ops.triton.linear.expert_rows import FEW_ROWS, MANY_ROWS, group_rows  # isort: skip
from quire.ops.triton.linear.plain_experts import plain_layer  # isort: skip
from quire.ops.triton.linear.plain_linear import TritonLinear  # isort: skip
from quire.ops.triton.linear.routed_experts import TritonExperts  # isort: skip
from quire.ops.triton.linear.stored_experts import stored_layer  # isort: skip

pytestmark = MARKS
WIDTH, INNER, NUM_EXPERTS, NUM_CHOSEN = 96, 48, 5, 2
# Inputs of the second layer of stored experts, in whole groups.
STORED_INNER = 64
ALL_FORMS = FORMS | FLOAT8 | {"float8 of 128": WeightForm(8, 128, "float32", levels="e4m3")}
# Forms of the columns of a layer, one after the other: each alone, two, and one in two parts.
COLUMNS = {name: (name,) for name in ALL_FORMS} | {
    "two forms": ("q4_0", "q5_1"),
    "a form twice": ("mxfp4", "mxfp4"),
    "groups of two sizes": ("q4_k", "q6_k"),
    "rounded rows and not": ("float8 of 32", "w8a16"),
}
ALL_OPTIONS: dict[str, dict[str, Any]] = OPTIONS | {"transposed": {"transposed": True, "scoring": "sigmoid"}}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_block(
    ops: Any, options: dict[str, Any], dtype: torch.dtype, stored: Callable[..., StoredWeight] | None = None
) -> Any:
    """Return a block of random experts, whose weights `stored` makes of a shape and a seed, where it is given."""
    device = torch.device("cpu" if isinstance(ops, ReferenceOps) else DEVICE)
    new_norm = partial(Norm, width=WIDTH, ops=ops, dtype=dtype, device=device)
    experts = Experts(NUM_EXPERTS, NUM_CHOSEN, INNER if stored is None else STORED_INNER, **options)
    block = ExpertsBlock(experts, WIDTH, ResidualAdd(), ops, new_norm)
    for seed, (name, slot) in enumerate(block.slots.items()):
        if stored is not None and name in ("gate_up.weight", "down.weight"):
            assert slot.fill_stored is not None
            slot.fill_stored(stored(*slot.shape, seed))
            continue
        weight = randn(*slot.shape, seed=seed).to(device)
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
    given, added = x.to(DEVICE), start.to(DEVICE)
    for num_rows in (1, 40):
        found = block(given[:num_rows], added[:num_rows])
        assert_near(found.cpu(), twin(x[:num_rows], start[:num_rows]), factor=4)
    assert_near(block.mix(given[:3]).cpu(), twin.mix(x[:3]), factor=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COLUMNS)
def test_products_of_stored_weights(name: str, dtype: torch.dtype) -> None:
    """Each number of both layers is that of the twin: few rows and many, columns that fill no tile, biases, scores."""
    forms = [ALL_FORMS[each] for each in COLUMNS[name]]
    # Where codes share bytes and scales allow it, an odd number of groups.
    width = 256 if any(form.scale == "two_level" or form.group == 128 for form in forms) else WIDTH
    linears: list[list[Any]] = [[], []]
    backends: list[Any] = [make_ops(), REFERENCE]
    for expert in range(3):
        parts = tuple(random_weight(form, 70, width, 5 * expert + idx) for idx, form in enumerate(forms))
        bias = randn(70 * len(forms), dtype=dtype, seed=expert)
        for ops, packed in zip(backends, linears, strict=True):
            own_bias = bias if ops is REFERENCE else bias.to(DEVICE)
            packed.append(ops.pack_linear(StoredWeight(parts, dtype), own_bias))
    layer = stored_layer(linears[0])
    assert layer is not None
    assert len(linears[0][0].parts) == len(set(forms))
    for num_rows in (1, 40):
        rows = randn(num_rows, width + 3, dtype=dtype, seed=9)
        x, given = rows[:, :width], rows.to(DEVICE)[:, :width]
        generator = torch.Generator().manual_seed(num_rows)
        chosen = torch.rand(num_rows, 3, generator=generator).topk(2).indices
        scores = torch.rand(num_rows, 2, generator=generator)
        groups = group_rows(chosen.to(DEVICE), scores.to(DEVICE), 3)
        assert groups.tile_rows == (MANY_ROWS if num_rows == 40 else FEW_ROWS)
        outputs = torch.stack([linear(x) for linear in linears[1]])
        expected = outputs[chosen.flatten().sort(stable=True).values, groups.row_ids.cpu()]
        scored = expected * groups.scores.cpu()[:, None]
        seen = given[groups.row_ids]
        first = layer.multiply(given, groups, is_first=True, scales_input=False)
        second = layer.multiply(seen, groups, is_first=False, scales_input=False)
        first, second = first.cpu(), second.cpu()
        assert (first.dtype, second.dtype) == (dtype, torch.float32)
        if any(form.levels == "e4m3" for form in forms):
            # Sums of float32 in some order, and one rounding; the twin's sums are exact.
            tolerance = 2e-5 if dtype is torch.float32 else 8e-3
            near: dict[str, Any] = {"rtol": tolerance, "atol": tolerance * float(expected.abs().max())}
            torch.testing.assert_close(first, expected, **near)
            torch.testing.assert_close(second, scored, **near)
            continue
        assert_same_numbers(first, expected)
        assert_same_numbers(second.to(dtype), scored.to(dtype))


@pytest.mark.parametrize("name", FORMS)
def test_a_large_value_rounds_its_own_group_only(name: str) -> None:
    weights = [StoredWeight((random_weight(FORMS[name], 70, 256, seed),), torch.float32) for seed in range(3)]
    layer = stored_layer([make_ops().pack_linear(weight) for weight in weights])
    assert layer is not None

    def multiply(rows: Tensor, *, is_first: bool) -> Tensor:
        chosen = torch.tensor([[0, 2], [1, 0], [2, 1]]).repeat(14, 1)[: len(rows)]
        groups = group_rows(chosen.to(DEVICE), torch.ones(chosen.shape, device=DEVICE), 3)
        given = rows if is_first else rows[groups.row_ids]
        return layer.multiply(given, groups, is_first=is_first, scales_input=False)

    for is_first in (True, False):
        assert_groups_apart(partial(multiply, is_first=is_first))


def of_form(form: str, *shape: int) -> QuantizedWeight:
    *size, seed = shape
    return random_weight(FORMS[form], size[0], size[1], seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "scaled-input", "shared-gate", "biases"])
def test_experts_of_stored_weights(name: str, dtype: torch.dtype) -> None:
    """What rounds to another whole number between the layers, where it was near one half, is worth some thousandths."""
    ops = make_ops()

    def stored(*shape: int) -> StoredWeight:
        return StoredWeight((of_form("mxfp4" if name == "biases" else "awq", *shape),), dtype)

    block, twin = (make_block(each, OPTIONS[name], dtype, stored) for each in (ops, REFERENCE))
    block.fuse(ops)
    assert isinstance(block.fused, TritonExperts)
    x, start = (randn(60, WIDTH, dtype=dtype, seed=seed) for seed in (99, 98))
    for num_rows in (1, 60):
        found = block.mix(x[:num_rows].to(DEVICE), start[:num_rows].to(DEVICE)).cpu()
        expected = twin.mix(x[:num_rows], start[:num_rows])
        tolerance = 4e-3 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("local", [(0, 2), (1, 4), (4, 5)], ids=str)
@pytest.mark.parametrize("name", ["plain", "scaled-input", "shared-gate", "biases", "stored"])
def test_experts_divided_among_ranks(name: str, local: tuple[int, int], dtype: torch.dtype) -> None:
    """Experts of one rank give what they give one by one, whatever memory held where nothing is computed.

    A row may have experts of this rank alone, of others alone, or of both.
    """

    def stored(*shape: int) -> StoredWeight:
        num_rows, width, seed = shape
        return StoredWeight((random_weight(FORMS["q4_0"], num_rows, width, seed),), dtype)

    ops = make_ops()
    options = {**OPTIONS.get(name, {}), "local": local}
    block, twin = (make_block(each, options, dtype, stored if name == "stored" else None) for each in (ops, REFERENCE))
    block.fuse(ops)
    assert isinstance(block.fused, TritonExperts)
    x = randn(40, WIDTH, dtype=dtype, seed=99)
    start = randn(40, WIDTH, dtype=dtype, seed=98)
    with uninitialized_as_nan():
        for first, end in ((0, 1), (1, 2), (2, 3), (3, 4), (0, 40)):
            rows = slice(first, end)
            found = block(x[rows].to(DEVICE), start[rows].to(DEVICE))
            assert_near(found.cpu(), twin(x[rows], start[rows]), factor=4)


@contextmanager
def uninitialized_as_nan() -> Iterator[None]:
    """Let new tensors without values hold NaN, on CPUs, where nothing else of determinism is in the way."""
    if DEVICE != "cpu":
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_experts_that_are_not_alike_run_one_by_one() -> None:
    """Forms that differ between experts, parts that are plain, inputs in an order of their own."""
    ops = make_ops()

    def forms(num_rows: int, width: int, seed: int) -> StoredWeight:
        half = num_rows // NUM_EXPERTS * 2
        return StoredWeight(
            (of_form("q4_0", half, width, seed), of_form("q8_0", num_rows - half, width, seed)), torch.float32
        )

    def plain(num_rows: int, width: int, seed: int) -> StoredWeight:
        half = num_rows // 2
        values = PlainWeight(randn(num_rows - half, width, seed=seed) * width**-0.5)
        return StoredWeight((of_form("q4_0", half, width, seed), values), torch.float32)

    def ordered(num_rows: int, width: int, seed: int) -> StoredWeight:
        return StoredWeight((of_form("q4_0", num_rows, width, seed),), torch.float32, torch.arange(width).flip(0))

    x = randn(7, WIDTH, seed=99)
    for stored in (forms, plain, ordered):
        block, twin = (make_block(each, {}, torch.float32, stored) for each in (ops, REFERENCE))
        block.fuse(ops)
        assert block.fused is None
        found, expected = block.mix(x.to(DEVICE)).cpu(), twin.mix(x)
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max()))


def test_weights_that_begin_anywhere_run_one_by_one() -> None:
    """Kernels load 16 bytes at once from addresses that they are told to be multiples of that."""
    ops = make_ops()
    whole = randn(2 * INNER * WIDTH + 1, dtype=torch.bfloat16, device=DEVICE)
    for start in (0, 1):
        weights = whole[start : start + 2 * INNER * WIDTH].view(2, INNER, WIDTH)
        layers = [TritonLinear(weight, None, None, ops.gate, ops.device) for weight in weights]
        assert (plain_layer(layers) is None) == bool(start)


@pytest.mark.parametrize("here", [None, range(9), range(2), range(3, 8)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_groups_hold_each_row_once_for_each_of_its_experts(num_rows: int, here: range | None) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    chosen = torch.rand(num_rows, 9, generator=generator).topk(3).indices
    scores = torch.rand(num_rows, 3, generator=generator)
    groups = group_rows(chosen.to(DEVICE), scores.to(DEVICE), 9, here)
    here = range(9) if here is None else here
    row_ids, places = groups.row_ids.cpu(), groups.places.cpu()
    assert groups.tile_rows == (MANY_ROWS if num_rows == 300 else FEW_ROWS)
    found = []
    for idx, first, end in groups.tiles.T.tolist():
        if idx < len(here):
            spans = range(first, min(first + groups.tile_rows, end))
            found += [(int(row_ids[place]), here[idx]) for place in spans]
    known = [(row, expert) for row in range(num_rows) for expert in chosen[row].tolist()]
    assert sorted(found) == sorted((row, expert) for row, expert in known if expert in here)
    is_here = (chosen >= here.start) & (chosen < here.stop)
    assert torch.equal(row_ids[places][is_here], torch.arange(num_rows).int()[:, None].expand(-1, 3)[is_here])
    assert torch.equal(groups.scores.cpu()[places][is_here], scores[is_here])
    assert bool((places[~is_here] == 3 * num_rows - 1).all())
    if groups.is_last_absent is not None:
        assert bool(groups.is_last_absent) == (not bool(is_here.all()))
    assert (groups.is_last_absent is None) == (len(here) == 9)
