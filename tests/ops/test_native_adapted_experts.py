"""Experts with adapters as one native call give what the block gives without it, in every batch the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.models.modules.experts import ExpertsBlock
from quire.ops.cpu.native_experts import NativeExperts
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.adapted_linear import AdaptedLinear, StepAdapters
from quire.ops.interface.lora import LoraPart, LoraRows, LoraWeight
from quire.ops.interface.weight_memory import WeightMemory
from tests.ops.test_native_experts import (
    BF16,
    INNER,
    ONE_LEVEL,
    OPTIONS,
    WIDTH,
    make_block,
    rows_without_ties,
)
from tests.ops.test_native_layers import FORMATS, NATIVE_LEVELS, native_ops
from tests.ops.world import randn

# Adapters of all experts, of some, of second layers alone; a slot that is empty, and no adapter.
SLOTS = (None, 0, 3, 4, 7, 0)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weight(ranks: tuple[int, ...], in_width: int, out_width: int, seed: int, dtype: torch.dtype) -> LoraWeight:
    """Return matrices of as many parts as there are ranks, of equal numbers of columns."""
    a = (randn(sum(ranks), in_width, seed=seed) * in_width**-0.5).to(dtype)
    columns, parts = out_width // len(ranks), []
    for idx, rank in enumerate(ranks):
        b = (randn(columns, rank, seed=seed + 40 * idx + 1) * rank**-0.5).to(dtype)
        parts.append(LoraPart(b, sum(ranks[:idx]), idx * columns))
    return LoraWeight(a, tuple(parts))


def adapt(block: ExpertsBlock, ops: NativeOps, dtype: torch.dtype, *, is_dense: bool) -> StepAdapters:
    """Let the experts of a block take adapters, and where `is_dense` its router and its shared expert too."""
    step, memory = StepAdapters(), WeightMemory(4 << 20)
    for name, in_width, out_width in (("gate_up", WIDTH, 2 * INNER), ("down", INNER, WIDTH)):
        taker = block.slots[f"{name}.weight"].experts
        assert taker is not None
        adapters = taker.adapt(ops, step)
        whole = range(*adapters.bounds)
        ranks = (5, 3) if name == "gate_up" else (9,)
        for slot, experts in ((0, whole), (3, whole[1::2]), (4, whole if name == "down" else ())):
            weights = {idx: weight(ranks, in_width, out_width, 10 * slot + idx, dtype) for idx in experts}
            adapters.put(slot, adapters.pack(weights, memory))
    for name, slot_of_weight in block.slots.items():
        for each in slot_of_weight.adapted if is_dense else ():
            out_width, in_width = each.projection.slots["weight"].shape
            layer = ops.make_lora(out_width)
            layer.put(3, layer.pack(weight((4,), in_width, out_width, len(name), dtype), memory))
            each.projection.run = AdaptedLinear(each.projection.run, layer, step)
    return step


def begin(step: StepAdapters, num_rows: int, first: int = 0) -> list[int]:
    """Begin a step of rows with adapters, and return those without."""
    slots = [SLOTS[idx % len(SLOTS)] for idx in range(first, first + num_rows)]
    rows = LoraRows.of(slots, [1] * num_rows)
    step.begin(None if rows is None else (rows, None))
    return [idx for idx, slot in enumerate(slots) if slot in (None, 7)]


def assert_one_call_is_the_same(
    level: str,
    weights: str,
    options: dict[str, Any],
    dtype: torch.dtype = BF16,
    *,
    form: str | None = None,
    is_dense: bool = False,
) -> None:
    ops = native_ops(level, weights)
    block = make_block(ops, options, form, dtype)
    block.fuse(ops)
    x = rows_without_ties(block, dtype)
    start = randn(len(x), WIDTH, dtype=dtype, seed=98)
    plain = block.mix(x, start)
    step = adapt(block, ops, dtype, is_dense=is_dense)
    begin(step, len(x))
    expected = block.mix(x, start)
    block.fuse_adapted(ops)
    assert isinstance(block.fused_adapted, NativeExperts)
    found = block.mix(x, start)
    tolerance = 2e-2 if dtype == BF16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    without = begin(step, len(x))
    assert torch.equal(found[without], plain[without])
    assert (found != plain).any(-1).sum() > len(x) // 3
    for count in (1, 2, 7, 33):
        begin(step, count)
        assert torch.equal(block.mix(x[:count], start[:count]), found[:count])
    begin(step, 1, first=40)
    assert torch.equal(block.mix(x[40:41], start[40:41]), found[40:41])
    begin(step, len(x))
    step.begin((LoraRows(len(x) + 3, {4: [1]}), step.all))  # of a step with more rows, the output rows
    assert torch.equal(block.mix(x, start), found)
    step.begin(None)
    assert torch.equal(block.mix(x, start), plain)


@pytest.mark.parametrize("level", NATIVE_LEVELS)
@pytest.mark.parametrize("weights", FORMATS)
def test_formats_of_weights(level: str, weights: str) -> None:
    assert_one_call_is_the_same(level, weights, OPTIONS["shared-gate"])


@pytest.mark.parametrize("level", ONE_LEVEL)
@pytest.mark.parametrize("options", ["scaled-input", "shared-gate", "biases", "router-norm"])
def test_options_and_adapters_of_all_layers(level: str, options: str) -> None:
    assert_one_call_is_the_same(level, "int8", OPTIONS[options], torch.float32, is_dense=True)


@pytest.mark.parametrize("level", ONE_LEVEL)
def test_experts_of_one_rank(level: str) -> None:
    assert_one_call_is_the_same(level, "plain", {"renormalised": True, "local": (2, 7)})


@pytest.mark.parametrize("level", ONE_LEVEL)
@pytest.mark.parametrize("form", ["q4_k", "q6_k", "q8_0", "mxfp4", "w4a16"])
def test_stored_weights(level: str, form: str) -> None:
    options = OPTIONS["biases" if form == "mxfp4" else "renormalised"]
    assert_one_call_is_the_same(level, "plain", options, form=form)
