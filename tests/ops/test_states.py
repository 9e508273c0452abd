"""Recurrence by torch operators against its slow twin; mixers of all backends are in `test_recurrent_mixers.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import copy
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.nn import functional

from quire.execution.step.kv_storage import StateStorage
from quire.models.specs.spec import StateCacheShape
from quire.ops.interface.ops import PagedStates, StateBatch
from quire.ops.interface.recurrent_weights import SSMHeads
from quire.ops.pytorch.recurrent_mixers import Recurrence
from quire.ops.pytorch.torch_states import CHUNK_ROWS, TorchStepStates
from quire.ops.reference.reference_states import ReferenceStepStates
from tests.ops.backends import BACKENDS, TORCH_DEVICES, Backend
from tests.ops.world import REFERENCE, TOLERANCE, assert_near, randn

pytestmark = pytest.mark.pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# What is scanned, and what is corrected.
LAYER, CORRECTED = 1, 2
# Rows of each sequence; True where it has a state.
RAGGED = [(1, True), (20, False), (1, False), (2, True), (CHUNK_ROWS, True), (1, True), (CHUNK_ROWS + 1, False)]
RAGGED += [(3 * CHUNK_ROWS + 7, True), (1, True)]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class World:
    """A storage of three layers full of NaN, in which some sequences have a state on shuffled blocks.

    Args:
        spans: the rows of each sequence, and whether it has a state.
    """

    def __init__(
        self,
        spans: list[tuple[int, bool]],
        *,
        kernel: int = 4,
        num_heads: int = 6,
        num_groups: int = 1,
        head_dim: int = 8,
        state_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        ids = list(range(1, len(spans) + 3))
        random.Random(5).shuffle(ids)
        ids = ids[: len(spans)]
        num_channels = num_heads * head_dim + 2 * num_groups * state_dim
        kept = StateCacheShape(kernel - 1, num_channels, (num_heads, head_dim, state_dim))
        self.states = StateStorage(len(spans) + 3, 3, kept, dtype, device)
        self.states.data.fill_(0xFF)
        for block_id, (_, has_state) in zip(ids, spans, strict=True):
            if has_state:
                for layer_idx in range(3):
                    seed = 3 * block_id + layer_idx
                    inputs, sums = (
                        self.states.conv_states[layer_idx][block_id],
                        self.states.ssm_states[layer_idx][block_id],
                    )
                    inputs.copy_(randn(*inputs.shape, seed=seed))
                    sums.copy_(randn(*sums.shape, seed=seed))
        row_starts = list(accumulate((rows for rows, _ in spans), initial=0))
        self.batch = StateBatch(ids, row_starts, [has_state for _, has_state in spans])
        num_rows = row_starts[-1]
        self.rows = randn(num_rows, num_channels, dtype=dtype, device=device, seed=97)
        self.steps = randn(num_rows, num_heads, dtype=dtype, device=device, seed=98)
        self.parts = (num_heads * head_dim, num_groups * state_dim, num_groups * state_dim)
        self.pairs = randn(num_rows, 2, num_groups * head_dim, device=device, seed=95)
        self.values = randn(num_rows, num_heads * state_dim + 3, dtype=dtype, device=device, seed=96)
        self.taps = randn(kernel, num_channels, device=device, seed=1) / kernel
        self.bias = randn(num_channels, device=device, seed=2)
        decays = -randn(num_heads, device=device, seed=3).exp()
        self.heads = SSMHeads(decays, randn(num_heads, device=device, seed=4), randn(num_heads, device=device, seed=5))

    def part(self, seq: int, start: int, end: int, has_state: bool) -> World:
        """Return a step of some of a sequence's rows, over the same storage."""
        part, rows = copy(self), slice(start, end)
        part.batch = StateBatch([self.batch.block_ids[seq]], [0, end - start], [has_state])
        part.rows, part.steps, part.pairs, part.values = (
            whole[rows] for whole in (self.rows, self.steps, self.pairs, self.values)
        )
        return part

    def run(self, make: Callable[[StateBatch, PagedStates], Recurrence]) -> list[torch.Tensor]:
        """Convolve and scan in one layer, and correct in another; return the outputs."""
        step = make(self.batch, self.states)
        convolved = step.causal_conv(LAYER, self.rows, self.taps, self.bias, True)
        x, B, C = self.rows.split_with_sizes(self.parts, 1)
        scanned = step.ssm_scan(LAYER, x, B, C, self.steps, self.heads)
        key_dim, wide = self.states.ssm_states[CORRECTED].shape[2], self.steps.float()
        keys = functional.normalize(self.pairs[:, 1].reshape(len(self.pairs), -1, key_dim), dim=-1).flatten(1)
        decays = functional.softplus(wide) * self.heads.A
        values = self.values[:, :-3]  # their rows lie apart
        corrected = step.gated_delta_rule(CORRECTED, self.pairs[:, 0], keys, values, decays, wide.sigmoid())
        return [convolved, scanned, corrected]

    def check(self, make: Callable[[StateBatch, PagedStates], Recurrence] = TorchStepStates) -> None:
        """Compare outputs and states with the reference's."""
        given = (self.rows, self.pairs, self.values)
        before, kept = self.states.data.clone(), [each.clone() for each in given]
        expected = self.run(ReferenceStepStates)
        written = self.states.data.clone()
        inputs, sums = self.states.conv_states[LAYER].clone(), [each.clone() for each in self.states.ssm_states]
        self.states.data.copy_(before)
        found = self.run(make)
        assert [y.dtype for y in found] == [self.rows.dtype, torch.float32, torch.float32]
        assert all(y.is_contiguous() for y in found)
        assert_near(found[0], expected[0], factor=2)
        for layer_idx, y in ((LAYER, 1), (CORRECTED, 2)):
            # Sums of products of numbers near 1: their rounding grows with the largest of them.
            near: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-6 * expected[y].abs().max().item()}
            torch.testing.assert_close(found[y], expected[y], **near)
            torch.testing.assert_close(self.states.ssm_states[layer_idx], sums[layer_idx], **near, equal_nan=True)
        # Not near but equal: inputs are kept as they are, and nothing else is touched.
        assert torch.equal(self.states.conv_states[LAYER].nan_to_num(), inputs.nan_to_num())
        unused = [idx for idx in range(len(before)) if idx not in self.batch.block_ids]
        assert torch.equal(self.states.data[unused], before[unused])
        layers, layers_before = (data.view(len(data), 3, -1) for data in (self.states.data, before))
        assert torch.equal(layers[:, 0], layers_before[:, 0])
        behind_sums = sums[CORRECTED][0].nbytes
        assert torch.equal(layers[:, CORRECTED, behind_sums:], layers_before[:, CORRECTED, behind_sums:])
        assert not torch.equal(written, before)
        assert all(torch.equal(each, was) for each, was in zip(given, kept, strict=True))


@pytest.mark.parametrize("device", TORCH_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [2, 3, 4, 9])
def test_states(device: str, dtype: torch.dtype, kernel: int) -> None:
    World(RAGGED, kernel=kernel, dtype=dtype, device=device).check()


@pytest.mark.parametrize("device", TORCH_DEVICES)
@pytest.mark.parametrize(("num_heads", "num_groups"), [(1, 1), (4, 2), (6, 3), (3, 3)])
@pytest.mark.parametrize(("head_dim", "state_dim"), [(1, 1), (5, 7), (32, 128)])
def test_states_by_shape(device: str, num_heads: int, num_groups: int, head_dim: int, state_dim: int) -> None:
    shape: dict[str, Any] = {
        "num_heads": num_heads,
        "num_groups": num_groups,
        "head_dim": head_dim,
        "state_dim": state_dim,
    }
    World(RAGGED[:6], **shape, device=device).check()


@pytest.mark.parametrize("device", TORCH_DEVICES)
@pytest.mark.parametrize("cuts", [[1] * 9, [3, 1, 5, 60, 64, 1], [2 * CHUNK_ROWS, 1, 1, CHUNK_ROWS - 1]], ids=str)
def test_steps_carry_a_state_as_one_step_does(device: str, cuts: list[int]) -> None:
    num_rows = sum(cuts)
    whole = World([(num_rows, False)], device=device)
    expected = whole.run(TorchStepStates)
    parts = World([(num_rows, False)], device=device)
    ends = zip(accumulate(cuts, initial=0), accumulate(cuts), strict=False)
    found = [parts.part(0, start, end, start > 0).run(TorchStepStates) for start, end in ends]
    for pieces, y in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(pieces), y, rtol=1e-5, atol=2e-6 * y.abs().max().item())
    for layer_idx in (LAYER, CORRECTED):
        sums, same = parts.states.ssm_states[layer_idx], whole.states.ssm_states[layer_idx]
        torch.testing.assert_close(sums, same, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(parts.states.conv_states[LAYER].nan_to_num(), whole.states.conv_states[LAYER].nan_to_num())


@pytest.mark.parametrize("device", TORCH_DEVICES)
def test_a_sequence_gets_the_same_result_beside_others(device: str) -> None:
    """Each state is carried by itself, so company does not change a result."""
    world = World(RAGGED, device=device)
    before = world.states.data.clone()
    together = world.run(TorchStepStates)
    world.states.data.copy_(before)
    batch = world.batch
    for idx, has_state in enumerate(batch.has_state):
        start, end = batch.row_starts[idx : idx + 2]
        for alone, beside in zip(world.part(idx, start, end, has_state).run(TorchStepStates), together, strict=True):
            torch.testing.assert_close(alone, beside[start:end], rtol=1e-6, atol=1e-6)


def test_a_fast_head_does_not_blur_what_comes_after() -> None:
    """A row that forgets everything makes the sums of a chunk huge; the differences after it must stay exact."""
    world = World([(CHUNK_ROWS, False)])
    world.steps.fill_(-4.0)
    world.steps[3] = 80_000.0
    world.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_groups", [1, 3])
def test_gated_norm(backend: Backend, dtype: torch.dtype, num_groups: int) -> None:
    """One rounding, of rows that lie apart."""
    device = backend.device
    x, gates = randn(7, 48, device=device), randn(7, 60, dtype=dtype, device=device, seed=1)[:, :48]
    weight = randn(num_groups, 48 // num_groups, device=device, seed=2)
    found = backend.make().gated_norm(x, gates, weight, 1e-5)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert_near(found, REFERENCE.gated_norm(x, gates, weight, 1e-5))
    wide = (x.double() * functional.silu(gates.double())).view(7, num_groups, -1)
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(found.double(), exact.flatten(1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
