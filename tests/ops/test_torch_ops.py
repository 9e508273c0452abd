"""The torch backend's fallbacks and tiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.ops.pytorch.torch_ops import PackedLinear, PlainLinear, TorchOps, packing_works
from tests.ops.world import World, assert_near, randn

pytestmark = pytest.mark.pairwise

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_linear_falls_back_where_packing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch that lacks the operators, or whose operators compute something else, gets plain products."""
    ops = TorchOps(CPU)
    assert isinstance(ops.pack_linear(randn(8, 8)), PackedLinear) == packing_works(torch.float32)
    monkeypatch.setattr(PackedLinear, "__call__", lambda _, x, *_residual: x.new_zeros(len(x), 48))
    assert not packing_works(torch.float32)
    monkeypatch.setattr("quire.ops.pytorch.torch_ops._onednn", lambda: object())
    assert not packing_works(torch.float32)
    linear = TorchOps(CPU).pack_linear(randn(8, 8))
    assert isinstance(linear, PlainLinear)
    assert_near(linear(randn(3, 8)), randn(3, 8) @ randn(8, 8).T)


def test_attention_in_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where contexts are long the tiles shrink, in the end to one row."""
    for limit in (1, 4 * 100 * 7, 4 * 100 * 33):
        monkeypatch.setattr("quire.ops.pytorch.torch_attention.TILE_SCORES", limit)
        World([(30, 70), (0, 100), (99, 1)]).check(TorchOps(CPU))
        World([(30, 70), (0, 100), (99, 1)], window=25).check(TorchOps(CPU))
        World([(30, 70), (0, 100), (99, 1)], chunk=45).check(TorchOps(CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile_tokens", [1, 32, 48])
@pytest.mark.parametrize("window", [None, 40])
def test_a_single_row_scores_long_contexts_in_tiles(
    monkeypatch: pytest.MonkeyPatch, tile_tokens: int, dtype: torch.dtype, window: int | None
) -> None:
    monkeypatch.setattr("quire.ops.pytorch.torch_attention.TILE_TOKENS", tile_tokens)
    for block_size in (8, 16):
        spans = [(95, 1), (96, 1), (97, 1), (30, 1), (40, 60)]
        World(spans, block_size=block_size, window=window, dtype=dtype).check(TorchOps(CPU))
