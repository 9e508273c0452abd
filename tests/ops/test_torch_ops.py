"""The torch backend against its slow twin."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch

from quire.execution.storage import KVStorage
from quire.ops import make_ops
from quire.ops.interface import AttentionBatch, Ops
from quire.ops.reference import ReferenceOps
from quire.ops.torch_ops import PackedLinear, PlainLinear, TorchOps, packing_works

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REFERENCE = ReferenceOps()
# What one rounding of a result near 1 may cost.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, *, factor: float = 1.0) -> None:
    tolerance = factor * TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(device: str, dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    weight = randn(80, 48, dtype=dtype, device=device) * 0.1
    bias = randn(80, dtype=dtype, device=device, seed=1) if has_bias else None
    x, residual = randn(num_rows, 48, dtype=dtype, device=device), randn(num_rows, 80, dtype=dtype, device=device)
    linear = make_ops(torch.device(device)).pack_linear(weight.clone(), bias)
    twin = REFERENCE.pack_linear(weight, bias)
    kept = residual.clone()
    assert_near(linear(x), twin(x))
    assert_near(linear(x, residual), twin(x, residual), factor=2)
    assert torch.equal(residual, kept)


def test_linear_falls_back_where_packing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch that lacks the operators, or whose operators compute something else, gets plain products."""
    ops = TorchOps(torch.device("cpu"))
    assert isinstance(ops.pack_linear(randn(8, 8)), PackedLinear) == packing_works(torch.float32)
    monkeypatch.setattr(PackedLinear, "__call__", lambda _, x, *_residual: x.new_zeros(len(x), 48))
    assert not packing_works(torch.float32)
    monkeypatch.setattr("quire.ops.torch_ops._onednn", lambda: object())
    assert not packing_works(torch.float32)
    linear = TorchOps(torch.device("cpu")).pack_linear(randn(8, 8))
    assert isinstance(linear, PlainLinear)
    assert_near(linear(randn(3, 8)), randn(3, 8) @ randn(8, 8).T)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elementwise(device: str, dtype: torch.dtype) -> None:
    ops = make_ops(torch.device(device))
    x = randn(5, 6, 32, dtype=dtype, device=device)
    row_of_heads = x.flatten(1)
    kept = x.clone()
    assert_near(ops.rms_norm(x[0], x[1, 0], 1e-5), REFERENCE.rms_norm(x[0], x[1, 0], 1e-5), factor=2)
    assert_near(ops.rms_norm(x[:, 1:5], x[0, :4], 1e-5), REFERENCE.rms_norm(x[:, 1:5], x[0, :4], 1e-5), factor=2)
    assert_near(ops.silu_mul(row_of_heads), REFERENCE.silu_mul(row_of_heads), factor=2)
    angles = randn(5, 1, 16, device=device, seed=2)
    cos = angles.cos().repeat(1, 1, 2).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    assert_near(ops.rotary(x[:, 1:4], cos, sin), REFERENCE.rotary(x[:, 1:4], cos, sin), factor=2)
    ids = torch.tensor([3, 0, 3], device=device)
    assert torch.equal(ops.embedding(ids, x[:, 0]), REFERENCE.embedding(ids, x[:, 0]))
    assert torch.equal(x, kept)


class World:
    """A storage full of NaN in which sequences on shuffled blocks have stored their histories.

    Args:
        spans: for each sequence its history and its rows of this step, in tokens.
    """

    def __init__(
        self,
        spans: list[tuple[int, int]],
        *,
        block_size: int = 16,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        group: int = 2,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        num_blocks = [-(-(history + rows) // block_size) for history, rows in spans]
        ids = list(range(1, sum(num_blocks) + 3))
        random.Random(5).shuffle(ids)
        ids = ids[: sum(num_blocks)]
        block_starts = list(accumulate(num_blocks, initial=0))
        self.kv = KVStorage(sum(num_blocks) + 3, 3, block_size, num_kv_heads, head_dim, dtype, device)
        self.kv.data.fill_(float("nan"))
        new_slots = []
        for seq, (history, rows) in enumerate(spans):
            table = torch.tensor(ids[block_starts[seq] : block_starts[seq + 1]])
            positions = torch.arange(history + rows)
            blocks, offsets = table[positions // block_size], positions % block_size
            new_slots.append((blocks * block_size + offsets)[history:])
            stored = randn(history, 3, 2, num_kv_heads, head_dim, dtype=dtype, device=device, seed=seq)
            self.kv.data[blocks[:history], :, :, :, offsets[:history]] = stored
        self.batch = AttentionBatch(
            torch.cat(new_slots).to(device),
            list(accumulate((rows for _, rows in spans), initial=0)),
            [history + rows for history, rows in spans],
            torch.tensor(ids, device=device),
            block_starts,
        )
        heads = (group * num_kv_heads, num_kv_heads, num_kv_heads)
        qkv = randn(sum(rows for _, rows in spans), sum(heads), head_dim, dtype=dtype, device=device, seed=99)
        self.q, self.k, self.v = qkv.split_with_sizes(heads, 1)  # slices of one tensor, as a model hands them over
        self.scale = head_dim**-0.5

    def run(self, ops: Ops, layer_idx: int = 1) -> torch.Tensor:
        """Write and attend in one layer."""
        step = ops.step_attention(self.batch, self.kv)
        step.write(layer_idx, self.k, self.v)
        return step.attend(layer_idx, self.q, self.scale)

    def check(self, device: str = "cpu") -> None:
        """Compare the cache and the outputs of both backends."""
        before = self.kv.data.clone()
        expected = self.run(REFERENCE)
        written = self.kv.data.clone()
        self.kv.data.copy_(before)
        found = self.run(make_ops(torch.device(device)))
        torch.testing.assert_close(self.kv.data, written, rtol=0, atol=0, equal_nan=True)
        assert found.is_contiguous()
        assert found.shape == expected.shape
        assert_near(found, expected, factor=2)


RAGGED = [(0, 20), (37, 1), (0, 1), (15, 1), (16, 5), (63, 2), (30, 34), (5, 1), (0, 64)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_attention_by_block_size(device: str, dtype: torch.dtype, block_size: int) -> None:
    World(RAGGED, block_size=block_size, dtype=dtype, device=device).check(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_attention_by_head_dim(device: str, dtype: torch.dtype, head_dim: int) -> None:
    World(RAGGED, head_dim=head_dim, dtype=dtype, device=device).check(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (4, 1), (3, 2), (2, 4), (1, 8), (2, 16)])
def test_attention_by_heads(device: str, dtype: torch.dtype, num_kv_heads: int, group: int) -> None:
    World(RAGGED, num_kv_heads=num_kv_heads, group=group, dtype=dtype, device=device).check(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spans", [[(0, 1)], [(600, 1)], [(0, 150)], [(90, 130)], [(300, 1), (3, 1), (1, 70)]], ids=str)
def test_attention_by_length(device: str, spans: list[tuple[int, int]]) -> None:
    World(spans, device=device).check(device)


def test_attention_in_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where contexts are long the tiles shrink, in the end to one row."""
    for limit in (1, 4 * 100 * 7, 4 * 100 * 33):
        monkeypatch.setattr("quire.ops.torch_attention.TILE_SCORES", limit)
        World([(30, 70), (0, 100), (99, 1)]).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile_tokens", [1, 32, 48])
def test_a_single_row_scores_long_contexts_in_tiles(
    monkeypatch: pytest.MonkeyPatch, tile_tokens: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("quire.ops.torch_attention.TILE_TOKENS", tile_tokens)
    for block_size in (8, 16):
        World([(95, 1), (96, 1), (97, 1), (30, 1), (40, 60)], block_size=block_size, dtype=dtype).check()


def test_heads_of_a_group_may_differ_by_layer() -> None:
    """Layers with other numbers of query heads share a step, for a cache group knows KV heads only."""
    world = World([(20, 1), (5, 1)], group=4)
    steps = [ops.step_attention(world.batch, world.kv) for ops in (make_ops(torch.device("cpu")), REFERENCE)]
    steps[0].write(0, world.k, world.v)
    for num_heads in (8, 2, 4, 8):
        q = world.q[:, :num_heads]
        assert_near(steps[0].attend(0, q, world.scale), steps[1].attend(0, q, world.scale))


def test_layers_do_not_meet() -> None:
    """Layers share a step's row ids, and none reads what another one wrote."""
    world = World([(0, 9), (0, 1)])
    step = make_ops(torch.device("cpu")).step_attention(world.batch, world.kv)
    for layer_idx in range(3):
        step.write(layer_idx, world.k, world.v + layer_idx)
    outputs = [step.attend(layer_idx, world.q, world.scale) for layer_idx in range(3)]
    for layer_idx in (1, 2):
        torch.testing.assert_close(outputs[layer_idx], outputs[0] + layer_idx)
