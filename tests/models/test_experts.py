"""The block of experts beside its slow twin, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from quire.models.experts import ExpertsBlock
from quire.models.spec import Experts
from quire.ops.interface import Linear
from quire.ops.torch_ops import TorchOps

WIDTH = 12
PLAIN = Experts(5, 2, 8)


class CountingOps(TorchOps):
    """The torch backend, with a list of the rows of every product."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.rows: list[int] = []

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        linear = super().pack_linear(weight, bias)

        def run(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            self.rows.append(len(x))
            return linear(x, residual)

        return run


def filled(experts: Experts, ops: TorchOps) -> tuple[ExpertsBlock, dict[str, torch.Tensor]]:
    """Return a block with random weights, and these."""
    block = ExpertsBlock(experts, WIDTH, ops)
    generator = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(slot.shape, generator=generator) for name, slot in block.slots.items()}
    for name, slot in block.slots.items():
        slot.fill(weights[name])
    return block, weights


def gated(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return what a gated MLP makes of a row."""
    gate, up = (gate_up @ x).chunk(2)
    return down @ (functional.silu(gate) * up)


def expected_row(x: torch.Tensor, experts: Experts, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the experts make of a row: all scores, the best of them, one expert after the other."""
    weights = {name: weight.double() for name, weight in weights.items()}
    x = x.double()
    logits = weights["router.weight"] @ x
    scores = logits.softmax(0) if experts.scoring == "softmax" else logits.sigmoid()
    best = sorted(range(experts.num_experts), key=lambda idx: -scores[idx])[: experts.num_chosen]
    total = sum(scores[idx] for idx in best) if experts.renormalised else 1.0
    result = torch.zeros(WIDTH, dtype=torch.float64)
    for idx in best:
        parts = []
        for name in ("gate_up.weight", "down.weight"):
            stored = weights[name]
            parts.append(stored[idx].T if experts.transposed else stored.chunk(experts.num_experts)[idx])
        score = scores[idx] / total
        result += gated(score * x, *parts) if experts.scaled_input else score * gated(x, *parts)
    if experts.shared_width:
        result += gated(x, weights["shared.gate_up.weight"], weights["shared.down.weight"])
    return result


@pytest.mark.parametrize("shared_width", [0, 6])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scaled_input", [False, True])
@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_are_chosen_and_scored(
    scoring: Any, renormalised: bool, scaled_input: bool, transposed: bool, shared_width: int
) -> None:
    experts = Experts(5, 2, 8, scoring, renormalised, scaled_input, shared_width, transposed=transposed)
    block, weights = filled(experts, TorchOps(torch.device("cpu")))
    x, residual = torch.randn(2, 17, WIDTH, generator=torch.Generator().manual_seed(6))
    kept = residual.clone()
    with torch.inference_mode():
        found = block(x, residual)
    assert torch.equal(residual, kept)
    expected = torch.stack([expected_row(row, experts, weights) for row in x]) + residual
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_an_expert_that_nobody_goes_through_costs_nothing() -> None:
    ops = CountingOps()
    block, weights = filled(PLAIN, ops)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        block(x[:1], x[:1])
        # The router, and two products for each of two experts.
        assert ops.rows == [1] * 5
        ops.rows.clear()
        block(x, x)
    counts = (x @ weights["router.weight"].T).topk(2).indices.flatten().bincount(minlength=5).tolist()
    assert ops.rows == [6, *(count for count in counts if count for _ in range(2))]


def test_what_experts_give_is_added_in_float32() -> None:
    """Eight times 0.75 to 256, where bfloat16 knows nothing below 2."""
    block = ExpertsBlock(Experts(8, 8, 1, "sigmoid"), WIDTH, TorchOps(torch.device("cpu")))
    weights = {name: torch.zeros(slot.shape, dtype=torch.bfloat16) for name, slot in block.slots.items()}
    weights["gate_up.weight"][0::2, 0], weights["gate_up.weight"][1::2, 0] = 16.0, 1.5 / 16.0
    weights["down.weight"].fill_(1.0)
    for name, slot in block.slots.items():
        slot.fill(weights[name])
    with torch.inference_mode():
        found = block(torch.ones(3, WIDTH, dtype=torch.bfloat16), torch.full((3, WIDTH), 256.0, dtype=torch.bfloat16))
    assert torch.equal(found, torch.full((3, WIDTH), 262.0, dtype=torch.bfloat16))
