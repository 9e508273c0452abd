"""Every backend against its slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from quire.ops.cpu.native_linear import NativeLinear
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.ops import Activation, HeadNorms, Rotation
from tests.ops.backends import BACKENDS, Backend
from tests.ops.world import RAGGED, REFERENCE, World, assert_near, randn

pytestmark = pytest.mark.pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = get_args(Activation)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(backend: Backend, dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    device = backend.device
    weight = randn(80, 48, dtype=dtype, device=device) * 0.1
    bias = randn(80, dtype=dtype, device=device, seed=1) if has_bias else None
    x, residual = randn(num_rows, 48, dtype=dtype, device=device), randn(num_rows, 80, dtype=dtype, device=device)
    linear = backend.make().pack_linear(weight.clone(), bias)
    twin = REFERENCE.pack_linear(weight, bias)
    kept = residual.clone()
    assert_near(linear(x), twin(x))
    assert_near(linear(x, residual), twin(x, residual), factor=2)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "num_columns"), [(1100, 130), (514, 64), (96, 1), (33, 70)])
@pytest.mark.parametrize("num_rows", [1, 6, 16, 17, 200])
def test_linear_in_pieces(backend: Backend, width: int, num_columns: int, num_rows: int) -> None:
    """Widths past a piece, columns that do not fill a panel, more rows than a job has, rows that lie apart."""
    dtype, device = torch.bfloat16, backend.device
    weight = randn(num_columns, width, dtype=dtype, device=device) * width**-0.5
    x = randn(num_rows, width + 3, dtype=dtype, device=device, seed=1)[:, :width]
    residual = randn(num_rows, num_columns, dtype=dtype, device=device, seed=2)
    ops = backend.make()
    linear, twin = ops.pack_linear(weight.clone()), REFERENCE.pack_linear(weight)
    assert_near(linear(x), twin(x))
    assert_near(linear(x, residual), twin(x, residual))
    if isinstance(linear, NativeLinear):
        assert torch.equal(linear(x[num_rows // 2 :]), linear(x)[num_rows // 2 :])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [6, 64, 150])
@pytest.mark.parametrize("num_rows", [1, 400])
def test_rows(backend: Backend, dtype: torch.dtype, width: int, num_rows: int) -> None:
    ops = backend.make()
    x = randn(num_rows, 2 * width, dtype=dtype, device=backend.device) * 8
    kept, half = x.clone(), x[:, :width]
    for scale_dtype in (dtype, torch.float32):
        weight = randn(width, dtype=scale_dtype, device=backend.device, seed=1)
        assert_near(ops.rms_norm(half, weight, 1e-5), REFERENCE.rms_norm(half, weight, 1e-5), factor=2)
    for activation in ACTIVATIONS:
        assert_near(ops.gate(x, activation), REFERENCE.gate(x, activation), factor=2)
    gates = x.flip(0) * 3
    assert_near(ops.sigmoid_gate(x, gates), REFERENCE.sigmoid_gate(x, gates), factor=2)
    ids = torch.tensor([num_rows - 1, 0, num_rows - 1], device=backend.device)
    assert torch.equal(ops.embedding(ids, x), REFERENCE.embedding(ids, x))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_scale_of_float32_costs_one_rounding(backend: Backend, dtype: torch.dtype) -> None:
    """Of rows and of heads; a scale of the rows' dtype costs up to three: its own, the norm's and the product's."""
    x = randn(200, 64, dtype=dtype, device=backend.device)
    scale = 1.0 + randn(64, device=backend.device, seed=1) / 8
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()
    one_rounding = torch.finfo(dtype).eps / 2 * 1.001

    def errors(found: torch.Tensor) -> torch.Tensor:
        return (found.double() - exact).abs() / exact.abs()

    ops = backend.make()
    assert errors(ops.rms_norm(x, scale, 1e-5)).max() < one_rounding
    assert errors(ops.rms_norm(x, scale.to(dtype), 1e-5)).max() > 1.5 * one_rounding
    # Heads that do not turn: each row holds one query head, its key head and its value head.
    world = World([(0, 200)], num_kv_heads=1, group=1, dtype=dtype, device=backend.device)
    step = ops.step_attention(world.batch, world.kv)
    still = Rotation(torch.ones_like(world.rotation.cos), torch.zeros_like(world.rotation.sin))
    queries = step.prepare(0, x.repeat(1, 3), HeadNorms(scale.repeat(2, 1), 1e-5), still)
    assert errors(queries[:, 0]).max() < one_rounding


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_at_the_ends_of_their_range(backend: Backend, dtype: torch.dtype, activation: Activation) -> None:
    gates = torch.tensor([-6e4, -200.0, -88.5, -30.0, 0.0, 30.0, 200.0, 6e4, float("nan")] * 3)
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None].to(backend.device, dtype)
    found, expected = backend.make().gate(gate_up, activation), REFERENCE.gate(gate_up, activation)
    # Where exponents are rounded to the dtype, tiny values are off by more than the relative bound.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-20, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_by_block_size(
    backend: Backend, dtype: torch.dtype, block_size: int, has_norms: bool, has_sinks: bool
) -> None:
    options: dict[str, Any] = {"has_norms": has_norms, "has_sinks": has_sinks}
    World(RAGGED, block_size=block_size, **options, dtype=dtype, device=backend.device).check(backend.make())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 288])
def test_attention_by_head_dim(backend: Backend, dtype: torch.dtype, head_dim: int) -> None:
    World(RAGGED, head_dim=head_dim, has_norms=True, dtype=dtype, device=backend.device).check(backend.make())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 288])
def test_values_may_be_normed(backend: Backend, dtype: torch.dtype, head_dim: int) -> None:
    World(RAGGED, head_dim=head_dim, has_value_norms=True, dtype=dtype, device=backend.device).check(backend.make())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 288])
@pytest.mark.parametrize("has_norms", [False, True])
def test_queries_alone(backend: Backend, dtype: torch.dtype, head_dim: int, has_norms: bool) -> None:
    """They are those that come with keys and values, and nothing is stored; another number of heads reads the same."""
    world = World(RAGGED, head_dim=head_dim, has_norms=has_norms, dtype=dtype, device=backend.device)
    steps = [ops.step_attention(world.batch, world.kv) for ops in (backend.make(), REFERENCE)]
    queries = steps[0].prepare(1, world.qkv, world.norms, world.rotation)
    stored = world.kv.data.clone()
    for num_heads in (4, 2):
        q = world.qkv[:, : num_heads * head_dim].contiguous()
        norms = None if world.norms is None else HeadNorms(world.norms.scales[:num_heads], world.norms.eps)
        found, expected = (step.prepare_queries(q, norms, world.rotation) for step in steps)
        assert_near(found, expected, factor=2)
        assert torch.equal(found, queries[:, :num_heads])
        assert torch.equal(world.kv.data.nan_to_num(), stored.nan_to_num())
        attended = [step.attend(1, expected, world.scale) for step in steps]
        assert_near(*attended, factor=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (4, 1), (3, 2), (1, 3), (2, 4), (1, 7), (1, 8), (2, 16)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_by_heads(
    backend: Backend, dtype: torch.dtype, num_kv_heads: int, group: int, has_sinks: bool
) -> None:
    heads: dict[str, Any] = {"num_kv_heads": num_kv_heads, "group": group}
    World(RAGGED, **heads, has_sinks=has_sinks, dtype=dtype, device=backend.device).check(backend.make())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(511, 1)],
        [(512, 1)],
        [(513, 3)],
        [(1600, 1), (700, 2), (40, 1)],
        [(0, 150)],
        [(90, 330)],
        [(300, 1), (1, 70)],
    ],
    ids=str,
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_by_length(
    backend: Backend, dtype: torch.dtype, spans: list[tuple[int, int]], has_sinks: bool
) -> None:
    World(spans, dtype=dtype, device=backend.device, has_sinks=has_sinks).check(backend.make())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("window", [1, 7, 16, 33, 1000])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_in_a_window(
    backend: Backend, dtype: torch.dtype, block_size: int, window: int, has_sinks: bool
) -> None:
    spans = [*RAGGED, (700, 1), (600, 20), (100, 200)]
    options: dict[str, Any] = {"block_size": block_size, "window": window, "has_sinks": has_sinks}
    World(spans, **options, dtype=dtype, device=backend.device).check(backend.make())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("soft_cap", [0.02, 0.5, 50.0])
@pytest.mark.parametrize(
    "options", [{}, {"window": 33, "has_sinks": True}, {"chunk": 40, "num_kv_heads": 1, "group": 8}]
)
def test_soft_caps_of_scores(backend: Backend, dtype: torch.dtype, soft_cap: float, options: dict[str, Any]) -> None:
    """Of scores that are all at the cap, that feel it, and that hardly do; of single rows, few rows and prompts."""
    spans = [*RAGGED, (700, 1), (600, 20), (100, 200)]
    world = World(spans, **options, dtype=dtype, device=backend.device, soft_cap=soft_cap)
    world.check(backend.make())


@pytest.mark.parametrize("backend", BACKENDS)
def test_soft_caps_of_scores_of_any_size(backend: Backend) -> None:
    """Scores of thousands are at the cap, whatever powers of two a processor has; a NaN stays one."""
    world, ops = World([*RAGGED, (1100, 1)], device=backend.device, soft_cap=2.0), backend.make()
    world.scale = 1e4
    # What is rounded in a score is ten thousand times as much here.
    assert_near(world.run(ops)[1], world.run(REFERENCE)[1], factor=100)
    world.qkv[0, :64] = float("nan")
    found = world.run(ops)[1].view(-1, 4, 64)
    assert found[0, 0].isnan().all()
    assert not found[1:].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_of_any_size(backend: Backend, dtype: torch.dtype) -> None:
    """One that takes all weight leaves nothing, one that takes none changes nothing; a NaN is its head's alone."""
    world = World([*RAGGED, (1100, 1)], dtype=dtype, device=backend.device, has_sinks=True)
    assert world.sinks is not None
    world.sinks.copy_(torch.tensor([1e6, -1e6, float("-inf"), float("nan")]))
    ops = backend.make()
    found = world.run(ops)[1].view(-1, 4, 64)
    world.sinks = None
    plain = world.run(ops)[1].view(-1, 4, 64)
    assert found[:, 0].eq(0.0).all()
    assert torch.equal(found[:, 1:3], plain[:, 1:3])
    assert found[:, 3].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("block_size", "chunk"), [(8, 1), (8, 40), (16, 7), (16, 40), (4, 520)])
def test_attention_in_chunks(backend: Backend, dtype: torch.dtype, block_size: int, chunk: int) -> None:
    """Single rows at both sides of a border, and rows across one border or several."""
    spans = [(0, 1), (39, 1), (40, 1), (41, 1), (519, 1), (520, 1), (1041, 1), (38, 4), (520, 2), (30, 90), (500, 30)]
    World(spans, block_size=block_size, chunk=chunk, dtype=dtype, device=backend.device).check(backend.make())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_sequence_gets_does_not_depend_on_the_others(backend: Backend, dtype: torch.dtype) -> None:
    """To the bit on the native path: how a context is cut into parts depends on the sequence alone."""
    spans = [(700, 1), (90, 40), (1300, 2)]
    together = World(spans, dtype=dtype, device=backend.device)
    ops = backend.make()
    _, outputs = together.run(ops)
    for seq, (start, end) in enumerate(zip(together.batch.row_starts, together.batch.row_starts[1:], strict=False)):
        first, last = together.batch.block_starts[seq : seq + 2]
        alone = World([spans[seq]], dtype=dtype, device=backend.device)
        alone.kv, alone.qkv = together.kv, together.qkv[start:end]
        alone.rotation = type(alone.rotation)(*(part[start:end] for part in together.rotation))
        alone.batch = type(alone.batch)(
            together.batch.slot_mapping[start:end],
            [0, end - start],
            [together.batch.context_lens[seq]],
            together.batch.block_ids[first:last],
            [0, last - first],
        )
        _, found = alone.run(ops)
        if isinstance(ops, NativeOps):
            assert torch.equal(found, outputs[start:end])
        assert_near(found, outputs[start:end])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_is_seen_by_whom_it_concerns_only(backend: Backend) -> None:
    for dtype in DTYPES:
        world = World([(30, 1), (200, 1), (0, 90), (10, 80)], dtype=dtype, device=backend.device)
        for seq in (1, 3):
            world.qkv[world.batch.row_starts[seq]] = float("nan")
        _, outputs = world.run(backend.make())
        is_nan = outputs.isnan().any(-1)
        starts = world.batch.row_starts
        concerned = {starts[1], *range(starts[3], starts[4])}
        assert set(is_nan.nonzero().flatten().tolist()) == concerned


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_a_group_may_differ_by_layer(backend: Backend) -> None:
    """Layers with other numbers of query heads share a step, for a cache group knows KV heads only."""
    world = World([(20, 1), (5, 1), (0, 3)], group=4, device=backend.device)
    steps = [ops.step_attention(world.batch, world.kv) for ops in (backend.make(), REFERENCE)]
    queries = steps[1].prepare(0, world.qkv, None, world.rotation)
    for num_heads in (8, 2, 4, 8):
        q = queries[:, :num_heads]
        assert_near(steps[0].attend(0, q, world.scale), steps[1].attend(0, q, world.scale))


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_do_not_meet(backend: Backend) -> None:
    """Layers share a step, and none reads what another one wrote."""
    world = World([(0, 9), (0, 1)], device=backend.device)
    step = backend.make().step_attention(world.batch, world.kv)
    values = world.qkv.view(10, -1, 64)[:, -2:]
    for layer_idx in range(3):
        queries = step.prepare(layer_idx, world.qkv, None, world.rotation)
        values += 1
    outputs = [step.attend(layer_idx, queries, world.scale) for layer_idx in range(3)]
    for layer_idx in (1, 2):
        torch.testing.assert_close(outputs[layer_idx], outputs[0] + layer_idx)
