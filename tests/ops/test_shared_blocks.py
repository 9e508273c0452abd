"""Attention over blocks that sequences share: against the slow twin, and how much is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from quire.ops.cpu.native_attention import NativeStepAttention
from tests.ops.backends import NATIVE, Backend
from tests.ops.world import REFERENCE, TOLERANCE, World

pytestmark = pytest.mark.pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Layout(NamedTuple):
    """Sequences, and what they share.

    Args:
        spans: for each sequence its history and its rows of this step.
        shares: (whose table, from whose, first token, end): whole blocks of both histories.
        num_read: tokens that a KV head must read with two query heads.
        window, chunk: see `World`.
    """

    spans: list[tuple[int, int]]
    shares: list[tuple[int, int, int, int]]
    num_read: int
    window: int | None = None
    chunk: int | None = None

    def world(self, dtype: torch.dtype, stored: str | None = None, **shape: Any) -> World:
        world = World(self.spans, window=self.window, chunk=self.chunk, dtype=dtype, stored=stored, **shape)
        block_size = world.kv.data.shape[4]
        ids, starts = world.batch.host_block_ids, world.batch.block_starts
        assert ids is not None, "worlds have both"
        for into, of, begin, end in self.shares:
            blocks = range(begin // block_size, end // block_size)
            for block in blocks:
                world.kv.data[ids[starts[into] + block]].view(torch.uint8).fill_(0xFF)  # no sequence has it any more
                ids[starts[into] + block] = ids[starts[of] + block]
        world.batch.block_ids.copy_(ids)
        return world


LAYOUTS = {
    # One read of 512 tokens, and what follows them.
    "prefix": Layout(
        [(560, 1), (100, 1), (530, 1), (700, 1)], [(2, 0, 0, 512), (3, 0, 0, 512)], 512 + 49 + 101 + 19 + 189
    ),
    "short": Layout([(310, 1), (400, 2), (290, 3)], [(1, 0, 0, 288), (2, 0, 0, 288)], 256 + 55 + 146 + 37),
    "tree": Layout(
        [(600, 1), (450, 1), (620, 1), (420, 1), (700, 1)],
        [(2, 0, 0, 512), (1, 0, 0, 256), (3, 0, 0, 256), (4, 0, 0, 256), (3, 1, 256, 384), (4, 1, 256, 384)],
        256 + (256 + 89 + 109) + (128 + 67 + 37 + 317),
    ),
    "fork": Layout([(1100, 1), (1100, 1)], [(1, 0, 0, 1088)], 1024 + 77 + 77),
    # Parts of more than 512 tokens, where threads have jobs enough.
    "long": Layout([(4400, 1), (4350, 1), (3000, 2)], [(1, 0, 0, 4336)], 4224 + 177 + 127 + 3002),
    # 64 sequences of two query heads fill a job.
    "many": Layout([(140, 1)] * 80, [(seq, 0, 0, 128) for seq in range(1, 80)], 2 * 128 + 80 * 13),
    # Only what follows a shared beginning counts.
    "middle": Layout([(600, 1), (640, 1)], [(1, 0, 128, 512)], 601 + 641),
    # Rows enough to be jobs of their own, and one that has nobody to share with.
    "chunks": Layout([(512, 30), (512, 16), (512, 80)], [(1, 0, 0, 512), (2, 0, 0, 512)], 542 + 528 + (576 + 592)),
    # A window ends within the last one's rows: it does not see all of what the others share.
    "window": Layout(
        [(700, 1), (710, 1), (720, 2)],
        [(1, 0, 0, 688), (2, 0, 0, 688)],
        (11 + 61) + 128 + (1 + 71) + 201,
        window=200,
    ),
    "chunk": Layout([(700, 1), (650, 1)], [(1, 0, 0, 640)], 128 + 61 + 11, chunk=256),
}


def check(world: World, backend: Backend, group: int = 2) -> int:
    """Compare with the reference; return the tokens read."""
    step = REFERENCE.step_attention(world.batch, world.kv)
    queries = step.prepare(1, world.qkv, world.norms, world.rotation)
    expected = world.attend(step, queries)
    native = backend.make().step_attention(world.batch, world.kv)
    assert isinstance(native, NativeStepAttention)
    tolerance = 3 * TOLERANCE[world.kv.dtype]
    torch.testing.assert_close(world.attend(native, queries), expected, rtol=tolerance, atol=tolerance)
    return native.plan(group * world.kv.data.shape[3]).tokens_read


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_shared_blocks(backend: Backend, dtype: torch.dtype, name: str, has_sinks: bool) -> None:
    layout = LAYOUTS[name]
    # Those with sinks have soft caps too.
    options: dict[str, Any] = {"has_sinks": has_sinks, "soft_cap": 0.7 if has_sinks else None}
    assert check(layout.world(dtype, **options), backend) == layout.num_read


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["prefix", "tree", "long", "many", "window"])
def test_shared_blocks_of_int8(backend: Backend, dtype: torch.dtype, name: str) -> None:
    layout = LAYOUTS[name]
    assert check(layout.world(dtype, "int8"), backend) == layout.num_read


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize(
    ("block_size", "group", "head_dim"), [(8, 1, 80), (32, 4, 128), (16, 16, 64), (64, 3, 256), (1, 2, 16)], ids=str
)
def test_shapes(backend: Backend, block_size: int, group: int, head_dim: int) -> None:
    for name in ("prefix", "tree"):
        world = LAYOUTS[name].world(
            torch.bfloat16, block_size=block_size, group=group, head_dim=head_dim, num_kv_heads=1
        )
        assert check(world, backend, group) < sum(world.batch.context_lens)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_share_a_job_do_not_meet(backend: Backend, dtype: torch.dtype) -> None:
    """A NaN in the query of one, or in its own tokens, is its own."""
    for place in (0, -1):
        world = LAYOUTS["prefix"].world(dtype)
        world.qkv[2, place] = float("nan")
        _, outputs = world.run(backend.make())
        assert outputs.isnan().any(-1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("backend", NATIVE)
def test_plans_of_layers_with_other_heads(backend: Backend) -> None:
    world = LAYOUTS["prefix"].world(torch.float32, group=4)
    steps = [ops.step_attention(world.batch, world.kv) for ops in (backend.make(), REFERENCE)]
    queries = steps[1].prepare(0, world.qkv, None, world.rotation)
    for num_heads in (8, 2, 4, 8):
        found, expected = (step.attend(0, queries[:, :num_heads], world.scale) for step in steps)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
