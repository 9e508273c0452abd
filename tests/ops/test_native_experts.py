"""The experts of a layer as one native call give what the block gives without it, in every batch the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.models.modules.experts import ExpertsBlock
from quire.models.modules.norms import Norm
from quire.models.modules.projections import ResidualAdd
from quire.models.specs.spec import Experts, RMSNorm
from quire.ops.cpu.native_experts import NativeExperts
from quire.ops.cpu.native_library import LEVELS
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.quantized_weight import StoredWeight
from tests.ops.backends import LIBRARIES
from tests.ops.test_native_layers import FORMATS, NATIVE_LEVELS, native_ops
from tests.ops.test_quantized_weights import FORMS, random_weight
from tests.ops.world import randn

WIDTH, INNER, NUM_EXPERTS, NUM_CHOSEN, NUM_ROWS = 256, 256, 9, 3, 45
CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHARED = {"shared_width": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "renormalised": {"renormalised": True, "sum_eps": 0.1, "score_scale": 1.5, "activation": "gelu_tanh"},
    "scaled-input": {"scoring": "sigmoid", "scaled_input": True, **SHARED},
    "choice-bias": {"scoring": "sigmoid", "choice_bias": True, "renormalised": True},
    "softmax-choice-bias": {"choice_bias": True},
    "shared-gate": {"renormalised": True, "shared_gate": True, **SHARED},
    "biases": {"renormalised": True, "bias": True, "interleaved": True, "activation": "swigluoai"},
    "router-norm": {"router_norm": RMSNorm(1e-6, wide=True), "logit_scale": WIDTH**-0.5, "expert_scales": True},
}
# The best level by default, the others in the slow run: what differs between levels is the products.
BEST = max(LIBRARIES, key=LEVELS.index, default=None)
ONE_LEVEL = [
    pytest.param(*level.values, marks=[*level.marks, *([] if level.values[0] == BEST else [pytest.mark.slow])])
    for level in NATIVE_LEVELS
]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_block(ops: NativeOps, options: dict[str, Any], form: str | None = None, dtype: torch.dtype = BF16) -> Any:
    """Return a block of random experts; of a form of stored weights where one is given."""

    def new_norm(norm: RMSNorm) -> Norm:
        return Norm(norm, WIDTH, ops, dtype, CPU)

    block = ExpertsBlock(Experts(NUM_EXPERTS, NUM_CHOSEN, INNER, **options), WIDTH, ResidualAdd(), ops, new_norm)
    for seed, (name, slot) in enumerate(block.slots.items()):
        if form is not None and name in ("gate_up.weight", "down.weight"):
            assert slot.fill_stored is not None
            num_rows, width = slot.shape
            slot.fill_stored(StoredWeight((random_weight(FORMS[form], num_rows, width, seed),), dtype))
        else:
            weight = randn(*slot.shape, seed=seed)
            slot.fill((weight * slot.shape[-1] ** -0.5 if weight.dim() > 1 else weight).to(slot.dtype or dtype))
    return block


def rows_without_ties(block: Any, dtype: torch.dtype = BF16) -> Tensor:
    """Return rows of which no two experts have the same logit: which of them is chosen is nobody's promise."""
    x = randn(4 * NUM_ROWS, WIDTH, dtype=dtype, seed=99)
    logits = block._router.run(x if block._router_norm is None else block._router_norm(x)).sort(-1).values
    return x[(logits.diff() > 0).all(-1)][:NUM_ROWS].contiguous()


def assert_one_call_is_the_same(block: Any, ops: NativeOps, dtype: torch.dtype = BF16) -> None:
    x = rows_without_ties(block, dtype)
    assert len(x) > 33, "rows of more than one way to share threads"
    start = randn(len(x), WIDTH, dtype=dtype, seed=98)
    expected = [block.mix(x, start), block.mix(x), block.mix(x, None, start.flip(0).contiguous())]
    block.fuse(ops)
    assert isinstance(block.fused, NativeExperts)
    found = [block.mix(x, start), block.mix(x), block.mix(x, None, start.flip(0).contiguous())]
    for one, other in zip(found[:2], expected[:2], strict=True):
        tolerance = 1e-2 if dtype == BF16 else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
    # What the router sees may have ties there; most rows have none.
    assert ((found[2] - expected[2]).abs().amax(-1) < 0.02 * expected[2].abs().max()).sum() > len(x) * 0.7
    for count in (1, 2, 7, 33):
        assert torch.equal(block.mix(x[:count], start[:count]), found[0][:count])
    assert torch.equal(block.mix(x[40:41], start[40:41]), found[0][40:41])


@pytest.mark.parametrize("level", NATIVE_LEVELS)
@pytest.mark.parametrize("weights", FORMATS)
def test_formats_of_weights(level: str, weights: str) -> None:
    ops = native_ops(level, weights)
    assert_one_call_is_the_same(make_block(ops, OPTIONS["shared-gate"]), ops)


@pytest.mark.parametrize("level", ONE_LEVEL)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(level: str, options: str) -> None:
    ops = native_ops(level, "int8")
    assert_one_call_is_the_same(make_block(ops, OPTIONS[options], dtype=torch.float32), ops, torch.float32)


@pytest.mark.parametrize("level", ONE_LEVEL)
@pytest.mark.parametrize("form", ["q4_k", "q6_k", "q8_0", "mxfp4", "w4a16", "gptq of eight bits"])
def test_stored_weights(level: str, form: str) -> None:
    ops = native_ops(level, "plain")
    assert_one_call_is_the_same(make_block(ops, OPTIONS["biases" if form == "mxfp4" else "renormalised"], form), ops)


@pytest.mark.parametrize("level", NATIVE_LEVELS)
def test_the_first_of_equal_experts_is_chosen_and_nan_spreads_no_further(level: str) -> None:
    ops = native_ops(level, "plain")
    block = make_block(ops, {"renormalised": True})
    block.slots["router.weight"].fill(torch.zeros(NUM_EXPERTS, WIDTH, dtype=BF16))
    x = randn(3, WIDTH, dtype=BF16)
    expected = sum(
        down(gate_up(x)).float() for gate_up, down in zip(block._gate_up.runs[:3], block._down.runs, strict=False)
    )
    block.fuse(ops)
    torch.testing.assert_close(block.mix(x).float(), expected / 3, rtol=1e-2, atol=1e-2)
    x[1, 5] = float("nan")
    assert block.mix(x).isnan().all(-1).tolist() == [False, True, False]


def test_products_of_torch_are_not_fused() -> None:
    """Weights of float32 are oneDNN's, and so are gates whose panels would not be whole."""
    ops = native_ops("portable", "plain")
    block = make_block(ops, {}, dtype=torch.float32)
    block.fuse(ops)
    assert block.fused is None
