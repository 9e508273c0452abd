"""The operations of encoders by torch equal their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.models.modules.rope import RotaryEmbedding
from quire.models.specs.rotations import Rope
from quire.ops.interface.ops import Elementwise
from quire.ops.pytorch import torch_encoder
from quire.ops.pytorch.torch_ops import TorchOps
from quire.ops.reference.reference_ops import ReferenceOps

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}
STARTS = (0, 1, 8, 23, 24, 60)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("has_rotation", [False, True])
def test_ragged_attention(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int | None, has_rotation: bool
) -> None:
    monkeypatch.setattr(torch_encoder, "WINDOW_ROWS", 5)
    qkv = torch.randn(60, 3 * 2 * 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    cpu = torch.device("cpu")
    rotation = RotaryEmbedding(Rope(100.0), 8, dtype, cpu)(torch.arange(60)) if has_rotation else None
    found, wanted = (ops.ragged_attention(qkv, 2, STARTS, rotation, window) for ops in (TorchOps(cpu), ReferenceOps()))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_addends_of_scores_by_distance(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    qkv = torch.randn(60, 3 * 2 * 8, generator=generator).to(dtype)
    bias = (2 * torch.randn(2, 2 * 50 + 1, generator=generator)).to(dtype)
    both = TorchOps(torch.device("cpu")), ReferenceOps()
    found, wanted = (ops.ragged_attention(qkv, 2, STARTS, None, None, bias) for ops in both)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norms_and_activations(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 24), (24,), (24,)))
    torch_ops, reference = TorchOps(torch.device("cpu")), ReferenceOps()
    close: dict[str, Any] = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for each in (bias, None):
        torch.testing.assert_close(
            torch_ops.layer_norm(3 * x + 1, weight, each, 1e-5),
            reference.layer_norm(3 * x + 1, weight, each, 1e-5),
            **close,
        )
    activations: tuple[Elementwise, ...] = ("gelu", "gelu_tanh", "relu", "relu2", "silu", "tanh")
    for name in activations:
        torch.testing.assert_close(torch_ops.activate(x, name), reference.activate(x, name), **close)
