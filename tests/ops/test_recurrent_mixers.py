"""Recurrent mixers between their projections: every backend against the slow twin, and the bits of native ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.execution.step.kv_storage import StateStorage
from quire.models.specs.recurrent_spec import StateCacheShape
from quire.ops.cpu.native_library import MAX_ROWS
from quire.ops.interface.ops import Ops, StateBatch, StepStates
from quire.ops.interface.recurrent_weights import GatedDeltaNetWeights, Mamba2Weights, ShortConvWeights, SSMHeads
from tests.ops.backends import CPU_BACKENDS, NATIVE, Backend
from tests.ops.world import REFERENCE, assert_near, randn

pytestmark = pytest.mark.pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYER, NUM_LAYERS = 1, 3
# Rows of each sequence; True where it has a state.
RAGGED = [
    (1, True),
    (20, False),
    (1, False),
    (MAX_ROWS + 1, True),
    (2, True),
    (MAX_ROWS, False),
    (1, True),
    (70, False),
]
DELTA_SHAPE = StateCacheShape(3, 4 * 16 + 4 * 24, (4, 16, 24))
SHORT_SHAPE = StateCacheShape(2, 300)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def delta_weights(shape: StateCacheShape = DELTA_SHAPE, num_groups: int = 2) -> GatedDeltaNetWeights:
    num_heads, key_dim, value_dim = shape.sums
    taps = randn(shape.num_columns + 1, shape.num_channels, seed=1) / shape.num_columns
    decays, dt_bias = -randn(num_heads, seed=2).exp(), randn(num_heads, seed=3)
    return GatedDeltaNetWeights(taps, decays, dt_bias, randn(value_dim, seed=4), 1e-6, num_groups, key_dim)


def short_conv_weights(shape: StateCacheShape = SHORT_SHAPE, has_bias: bool = False) -> ShortConvWeights:
    taps = randn(shape.num_columns + 1, shape.num_channels, seed=1)
    return ShortConvWeights(taps, randn(shape.num_channels, seed=2) if has_bias else None)


def mamba_weights(shape: StateCacheShape, written: int, has_norm: bool) -> Mamba2Weights:
    num_heads, head_dim, _ = shape.sums
    taps = randn(shape.num_columns + 1, shape.num_channels, seed=1) / shape.num_columns
    heads = SSMHeads(-randn(num_heads, seed=2).exp(), randn(num_heads, seed=3), randn(num_heads, seed=4))
    norm = randn(2, num_heads * head_dim // 2, seed=5) if has_norm else None
    return Mamba2Weights(taps, randn(shape.num_channels, seed=6), heads, norm, 1e-5, written, 0.9, 0.8)


class World:
    """A storage of three layers in which some sequences have a state, on shuffled blocks.

    Args:
        run: call of a mixer: step, layer index and projected rows to output.
        num_inputs: columns of projected rows.
        spans: rows of each sequence, and whether it has a state.
    """

    def __init__(
        self,
        run: Callable[[StepStates, int, Tensor], Tensor],
        shape: StateCacheShape,
        num_inputs: int,
        dtype: torch.dtype = torch.float32,
        spans: list[tuple[int, bool]] = RAGGED,
    ) -> None:
        self.run_mixer, self.spans = run, spans
        self.ids = random.Random(5).sample(range(1, len(spans) + 3), len(spans))
        self.states = StateStorage(len(spans) + 3, NUM_LAYERS, shape, dtype, "cpu")
        self.states.data.fill_(0xFF)  # NaN
        for block_id, (_, has_state) in zip(self.ids, spans, strict=True):
            for idx in range(NUM_LAYERS if has_state else 0):
                for part in (self.states.conv_states[idx][block_id], self.states.ssm_states[idx][block_id]):
                    part.copy_(randn(*part.shape, seed=3 * block_id + idx))
        self.before = self.states.data.clone()
        self.starts = list(accumulate((rows for rows, _ in spans), initial=0))
        self.projected = randn(self.starts[-1], num_inputs, dtype=dtype, seed=9)

    def reset(self) -> None:
        self.states.data.copy_(self.before)

    def run(self, ops: Ops) -> Tensor:
        """Run all sequences in one step."""
        batch = StateBatch(self.ids, self.starts, [has_state for _, has_state in self.spans])
        return self.run_mixer(ops.step_states(batch, self.states), LAYER, self.projected)

    def run_part(self, ops: Ops, seq: int, start: int, end: int) -> Tensor:
        """Run some rows of a sequence, in a step of their own."""
        batch = StateBatch([self.ids[seq]], [0, end - start], [self.spans[seq][1] or start > 0])
        rows = self.projected[self.starts[seq] + start : self.starts[seq] + end]
        return self.run_mixer(ops.step_states(batch, self.states), LAYER, rows)

    def check(self, ops: Ops, factor: float = 20.0) -> None:
        """Compare outputs and states with the reference's; nothing else is touched."""
        kept = self.projected.clone()
        expected = self.run(REFERENCE)
        conv, sums = self.states.conv_states[LAYER].clone(), self.states.ssm_states[LAYER].clone()
        self.reset()
        found = self.run(ops)
        assert found.is_contiguous()
        assert found.dtype == self.projected.dtype
        assert_near(found, expected, factor=factor if found.dtype == torch.float32 else 4)
        # Inputs of a sum may differ by a rounding of the convolution's outputs.
        tolerance = 2e-5 if found.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(self.states.ssm_states[LAYER], sums, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert torch.equal(self.states.conv_states[LAYER].nan_to_num(), conv.nan_to_num())
        unused = [idx for idx in range(len(self.before)) if idx not in self.ids]
        assert torch.equal(self.states.data[unused], self.before[unused])
        layers, before = (data.view(len(data), NUM_LAYERS, -1) for data in (self.states.data, self.before))
        assert torch.equal(layers[:, ::2], before[:, ::2])
        assert torch.equal(self.projected, kept)


def delta_world(shape: StateCacheShape = DELTA_SHAPE, num_groups: int = 2, **options: Any) -> World:
    weights = delta_weights(shape, num_groups)
    num_heads, _, value_dim = shape.sums
    num_inputs = shape.num_channels + num_heads * (value_dim + 2)
    return World(lambda step, idx, rows: step.gated_delta_net(idx, rows, weights), shape, num_inputs, **options)


def short_conv_world(shape: StateCacheShape = SHORT_SHAPE, has_bias: bool = False, **options: Any) -> World:
    weights = short_conv_weights(shape, has_bias)
    return World(lambda step, idx, rows: step.short_conv(idx, rows, weights), shape, 3 * shape.num_channels, **options)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [2, 4, 9])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_channels", [7, 300])
def test_short_convolutions(
    backend: Backend, dtype: torch.dtype, kernel: int, has_bias: bool, num_channels: int
) -> None:
    short_conv_world(StateCacheShape(kernel - 1, num_channels), has_bias, dtype=dtype).check(backend.make())


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [2, 4, 9])
@pytest.mark.parametrize(("num_heads", "num_groups"), [(1, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 5), (5, 7), (16, 24), (32, 144)])
def test_gated_delta_nets(
    backend: Backend, dtype: torch.dtype, kernel: int, num_heads: int, num_groups: int, key_dim: int, value_dim: int
) -> None:
    num_channels = 2 * num_groups * key_dim + num_heads * value_dim
    shape = StateCacheShape(kernel - 1, num_channels, (num_heads, key_dim, value_dim))
    # A key of one value is divided by its own length: near zero, a rounding of it grows a thousandfold.
    delta_world(shape, num_groups, dtype=dtype).check(backend.make(), factor=100.0 if key_dim == 1 else 20.0)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_mamba2(backend: Backend, dtype: torch.dtype, has_norm: bool) -> None:
    shape = StateCacheShape(3, 4 * 8 + 2 * 2 * 16, (4, 8, 16))
    weights = mamba_weights(shape, 2 * 16, has_norm)
    num_inputs = 4 * 8 + shape.num_channels + 4
    World(lambda step, idx, rows: step.mamba2(idx, rows, weights), shape, num_inputs, dtype).check(backend.make())


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("make_world", [delta_world, short_conv_world])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_gets_the_same_bits_beside_others_and_in_parts(
    backend: Backend, make_world: Callable[..., World], dtype: torch.dtype
) -> None:
    ops, world = backend.make(), make_world(dtype=dtype)
    together = world.run(ops)
    after = world.states.data.clone()
    for cut in (None, 7, 1):
        world.reset()
        for seq, (num_rows, _) in enumerate(world.spans):
            step = num_rows if cut is None or num_rows > MAX_ROWS else cut
            starts = range(0, num_rows, step)
            parts = [world.run_part(ops, seq, start, min(start + step, num_rows)) for start in starts]
            assert torch.equal(torch.cat(parts), together[world.starts[seq] : world.starts[seq + 1]])
        assert torch.equal(world.states.data, after)
