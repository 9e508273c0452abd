"""Triton's operations on rows and on masks, interpreted or on a GPU, against the slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from quire.ops.interface.ops import Activation
from tests.ops.triton.device import DEVICE, MARKS, make_ops, randn
from tests.ops.world import REFERENCE, assert_near

pytestmark = MARKS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [6, 64, 1100])
def test_rows(dtype: torch.dtype, width: int) -> None:
    ops = make_ops()
    x = randn(3, 2 * width, dtype=dtype) * 8
    kept, half = x.clone(), x[:, :width]
    for scale_dtype in (dtype, torch.float32):
        weight = randn(width, dtype=scale_dtype, seed=1)
        assert_near(ops.rms_norm(half, weight, 1e-5), REFERENCE.rms_norm(half, weight, 1e-5), factor=2)
    for activation in get_args(Activation):
        assert_near(ops.gate(x, activation), REFERENCE.gate(x, activation), factor=2)
    gates = x.flip(0) * 3
    assert_near(ops.sigmoid_gate(x, gates), REFERENCE.sigmoid_gate(x, gates), factor=2)
    for num_parts in (1, 2):
        scales = randn(num_parts, width // num_parts, seed=2)
        found, expected = (each.gated_norm(half.float().contiguous(), half, scales, 1e-5) for each in (ops, REFERENCE))
        assert_near(found, expected, factor=2)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_at_the_ends_of_their_range(dtype: torch.dtype) -> None:
    gates = torch.tensor([-6e4, -200.0, -88.5, -30.0, 0.0, 30.0, 200.0, 6e4, float("nan")], device=DEVICE)
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None].to(dtype)
    for activation in get_args(Activation):
        found, expected = (ops.gate(gate_up, activation) for ops in (make_ops(), REFERENCE))
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-20, equal_nan=True)


@pytest.mark.parametrize("vocab_size", [31, 1024, 1100])
def test_token_bitmask(vocab_size: int) -> None:
    logits = randn(4, vocab_size)
    generator = torch.Generator().manual_seed(1)
    size = (-(-vocab_size // 32),)
    masks = [torch.randint(-(2**31), 2**31, size, generator=generator, dtype=torch.int32) for _ in range(2)]
    found, expected = logits.clone(), logits.clone()
    make_ops().apply_token_bitmask(found, [3, 1], masks)
    REFERENCE.apply_token_bitmask(expected, [3, 1], masks)
    assert torch.equal(found, expected)
    assert torch.equal(found[[0, 2]], logits[[0, 2]])


def test_token_bitmasks_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of other memory may wait for the layers, which are launched before."""
    ops, copied = make_ops(), list[tuple[int, ...]]()
    placed = type(ops.device).placed

    def placed_seen(device: Any, tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tuple(tensor.shape))
        return placed(device, tensor)

    monkeypatch.setattr(type(ops.device), "placed", placed_seen)
    masks = [torch.zeros(5, dtype=torch.int32) for _ in range(2)]
    ops.apply_token_bitmask(torch.zeros(3, 160, device=DEVICE), [2, 0], masks)
    assert sorted(copied) == [(2,), (2, 5)]
