"""Norms of transformers' modules that the backend computes are those that give the same."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.models.hosted.norms import HostedNorm, recognise_norm, use_backend_norms
from quire.ops import make_ops
from quire.ops.interface.ops import Ops
from quire.ops.reference.reference_ops import ReferenceOps

WIDTH = 48
QWEN, OLMO = "Qwen3RMSNorm", "Olmo2RMSNorm"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PlainNorm(nn.Module):
    """A norm that limits large rows, and adds to the result.

    Args:
        limit: largest value of a row.
        offset: added number of weights.
    """

    def __init__(self, limit: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps, self.limit, self.offset = 1e-6, limit, offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x` [..., E]."""
        wide = x.float().clamp(-self.limit, self.limit)
        normed = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * normed.to(x.dtype) + self.offset * self.weight


def of(model_type: str, name: str, **options: Any) -> nn.Module:
    """Return a norm of transformers."""
    kind: Any = getattr(import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name)
    made: nn.Module = kind(WIDTH, **options)
    return made


def backends() -> list[Ops]:
    return [ReferenceOps(), make_ops(torch.device("cpu"))]


def with_weight(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a norm with a weight that one can tell from ones and from zeros."""
    for parameter in norm.parameters():
        parameter.data = torch.linspace(-1.5, 2.0, WIDTH).to(dtype)
    return norm


@pytest.mark.parametrize("ops", backends(), ids=lambda ops: ops.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("model_type", "name"), [("qwen3", QWEN), ("gemma", "GemmaRMSNorm"), ("olmo2", OLMO)])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_known_norms_give_what_the_module_gives(
    model_type: str, name: str, dtype: torch.dtype, eps: float, ops: Ops
) -> None:
    norm = with_weight(of(model_type, name, eps=eps), dtype)
    known = recognise_norm(norm, ops, dtype)
    assert known is not None
    assert known.eps == eps
    rows = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)).mul_(0.01).to(dtype)
    with torch.inference_mode():
        wanted, found = norm(rows), HostedNorm(norm, known, dtype, ops)(rows)
    assert found.shape == wanted.shape
    assert found.dtype is dtype
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5, atol=0)
    assert dtype.itemsize == 4 or float((found != wanted).float().mean()) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "norm",
    [
        of("olmo", "OlmoLayerNorm"),
        of("cohere", "CohereLayerNorm"),
        of("nemotron", "NemotronLayerNorm1P"),
        nn.LayerNorm(WIDTH),
        PlainNorm(20.0, 0.0),
        PlainNorm(1e9, 1.0),
        nn.Linear(WIDTH, 1, bias=False),
        nn.PReLU(WIDTH),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_others_keep_their_own_forward_pass(norm: nn.Module, dtype: torch.dtype) -> None:
    changed = copy.deepcopy(norm).to(dtype)
    use_backend_norms(changed, ReferenceOps(), dtype)
    assert "forward" not in vars(changed)


def test_the_plain_norm_is_one_without_its_changes() -> None:
    assert recognise_norm(with_weight(PlainNorm(1e9, 0.0), torch.float32), ReferenceOps(), torch.float32) is not None


def test_a_weight_of_another_dtype_keeps_its_roundings() -> None:
    """With a weight in float32, rows of bfloat16 come back as float32 from a norm that rounds before it scales."""
    norm = with_weight(of("qwen3", QWEN), torch.float32)
    assert recognise_norm(norm, ReferenceOps(), torch.bfloat16) is None
    known = recognise_norm(with_weight(of("olmo2", OLMO), torch.float32), ReferenceOps(), torch.bfloat16)
    assert known is not None
    assert known.scale.dtype is torch.float32


def test_rows_of_another_dtype_are_the_modules_own() -> None:
    model = nn.ModuleDict({"norm": with_weight(of("qwen3", QWEN), torch.bfloat16)})
    own: Any = copy.deepcopy(model["norm"])
    use_backend_norms(model, ReferenceOps(), torch.bfloat16)
    assert isinstance(vars(model["norm"])["forward"], HostedNorm)
    rows = torch.randn(4, WIDTH)
    assert torch.equal(model["norm"](rows), own(rows))
    strided = torch.randn(WIDTH, 4).to(torch.bfloat16).T
    assert torch.equal(
        model["norm"](strided), ReferenceOps().rms_norm(strided, own.weight.detach(), own.variance_epsilon)
    )
