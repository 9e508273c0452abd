"""Captured steps give the bits of the layers that they stand for, and layers that do more are not captured."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.execution.kv_storage import KVStorage
from quire.ops import make_ops
from quire.ops.captures import MAX_ROWS, BufferPool, CapturedLayers
from quire.ops.interface import AttentionBatch, Captures, Linear, Ops, Rotation
from quire.ops.native_library import LEVELS, NativeLibrary
from quire.ops.native_ops import NativeOps
from quire.ops.torch_ops import TorchOps
from quire.ops.torch_widened import WIDENED, narrowed
from tests.ops.backends import LIBRARIES
from tests.ops.world import randn, rotation_of

WIDTH, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 64, 4, 2, 16, 16
SPANS = [(37, 1), (5, 1)]
CPU = torch.device("cpu")
FORMATS = ("plain", "lossless", "int8", "int4")
NATIVE_LEVELS = [
    pytest.param(level, marks=[] if level in LIBRARIES else pytest.mark.skip(reason=f"no {level} kernels here"))
    for level in LEVELS
]


def native_ops(level: str, weights: str) -> NativeOps:
    library = NativeLibrary(level, LIBRARIES[level])
    if weights in ("int8", "int4"):
        return NativeOps(library, weights)
    return NativeOps(library, is_lossless=weights == "lossless")


class Model:
    """Two layers of all kernels: norms, attention, gates in a product and by themselves.

    Args:
        between: called with each layer's hidden states; what it returns goes on.
        width: how many times wider the gates are than rows.
    """

    def __init__(self, ops: Ops, between: Callable[[Tensor], Tensor] = lambda x: x, width: int = 1) -> None:
        self.ops = ops
        self._between = between
        self._scale = randn(WIDTH, dtype=torch.bfloat16, seed=1)
        heads = HEADS + 2 * KV_HEADS
        self._qkv = self._linear(heads * HEAD_DIM, WIDTH, 2)
        self._output = self._linear(WIDTH, HEADS * HEAD_DIM, 3)
        self._gate_up = self._linear(4 * width * WIDTH, WIDTH, 4, gate="silu")
        self._up = self._linear(2 * width * WIDTH, 2 * width * WIDTH, 5)
        self._down = self._linear(WIDTH, width * WIDTH, 6)

    def _linear(self, num_outputs: int, width: int, seed: int, gate: Any = None) -> Linear:
        weight = randn(num_outputs, width, dtype=torch.bfloat16, seed=seed) * width**-0.5
        return self.ops.pack_linear(weight, randn(num_outputs, dtype=torch.bfloat16, seed=seed + 20), gate=gate)

    def __call__(self, tensors: Sequence[Tensor], groups: Sequence[Any], storages: Sequence[Any]) -> Tensor:
        x, cos, sin = tensors
        steps = [self.ops.step_attention(*group) for group in zip(groups, storages, strict=True)]
        for layer_idx in range(2):
            for step in steps:
                qkv = self._qkv(self.ops.rms_norm(x, self._scale, 1e-6))
                queries = step.prepare(layer_idx, qkv, None, Rotation(cos, sin))
                x = self._output(step.attend(layer_idx, queries, 0.25), x)
            gated = self._gate_up(self.ops.rms_norm(x, self._scale, 1e-6))
            x = self._down(self.ops.gate(self._up(gated), "gelu_tanh"), x)
            x = self._between(x)
        return x


class Caches:
    """The memory of two cache groups, full of numbers: one of all tokens, one of a window."""

    def __init__(self, num_blocks: int = 220, stored: str | None = None) -> None:
        self.num_blocks = num_blocks
        self.storages = [
            KVStorage(num_blocks, 2, BLOCK, KV_HEADS, HEAD_DIM, torch.bfloat16, CPU, stored=stored) for _ in range(2)
        ]
        for seed, storage in enumerate(self.storages):
            fill_slots(storage, seed)
        self.contents = [storage.data.clone() for storage in self.storages]

    def step(self, spans: list[tuple[int, int]], seed: int = 0, num_shared: int = 0, window: int = 9) -> Step:
        """Return a step of sequences with so many tokens stored, and so many rows.

        Args:
            seed: of their blocks.
            num_shared: blocks at the front of every sequence that are the first one's.
        """
        groups = [self._batch(spans, seed, num_shared, sight) for seed, sight in ((seed, None), (seed + 1, window))]
        return Step(self, groups)

    def _batch(self, spans: list[tuple[int, int]], seed: int, num_shared: int, window: int | None) -> AttentionBatch:
        free = list(range(1, self.num_blocks))
        random.Random(seed).shuffle(free)
        tables = [[free.pop() for _ in range(-(-(history + rows) // BLOCK))] for history, rows in spans]
        slots = []
        for table, (history, rows) in zip(tables, spans, strict=True):
            table[:num_shared] = tables[0][:num_shared]
            slots += [
                table[position // BLOCK] * BLOCK + position % BLOCK for position in range(history, history + rows)
            ]
        return AttentionBatch(
            torch.tensor(slots),
            list(accumulate((rows for _, rows in spans), initial=0)),
            [history + rows for history, rows in spans],
            torch.tensor(list(chain.from_iterable(tables))),
            list(accumulate(map(len, tables), initial=0)),
            window,
        )


def fill_slots(storage: KVStorage, seed: int) -> None:
    """Store numbers in every slot, as the cache has them."""
    vectors = randn(*storage.data.shape[:-1], HEAD_DIM, dtype=torch.bfloat16, seed=seed)
    element = storage.data.dtype
    storage.data.copy_(narrowed(vectors, element) if element in WIDENED else vectors)


class Step:
    """A step over caches that are as they were before each run."""

    def __init__(self, caches: Caches, groups: list[AttentionBatch]) -> None:
        self.caches, self.groups = caches, groups
        self.num_rows = groups[0].row_starts[-1]
        self.rotation = rotation_of(self.num_rows, HEAD_DIM, torch.bfloat16)

    def run(self, layers: Any, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states that layers make of random rows, and what is in the caches behind it."""
        storages = self.caches.storages
        for storage, before in zip(storages, self.caches.contents, strict=True):
            storage.data.copy_(before)
        x = randn(self.num_rows, WIDTH, dtype=torch.bfloat16, seed=seed)
        hidden = layers((x, *self.rotation), self.groups, storages)
        return hidden, [storage.data.view(torch.uint8).clone() for storage in storages]


def assert_same(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[0].isfinite().all()
    assert all(torch.equal(*caches) for caches in zip(found[1], expected[1], strict=True))


def captured(model: Model) -> CapturedLayers:
    assert isinstance(model.ops, Captures)
    made = model.ops.captured(model)
    assert isinstance(made, CapturedLayers)
    return made


def check(layers: CapturedLayers, model: Model, steps: Iterable[Step]) -> None:
    """Run steps with both, and compare all that they leave."""
    for seed, step in enumerate(steps):
        assert_same(step.run(layers, seed), step.run(model, seed))


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("level", NATIVE_LEVELS)
@torch.inference_mode()
def test_replays_give_the_bits_of_the_layers(level: str, weights: str) -> None:
    model = Model(native_ops(level, weights))
    layers = captured(model)
    for stored in (None, "int8"):
        caches = Caches(stored=stored)
        for spans in (
            [(37, 1)],
            [(0, 1), (15, 1), (63, 1)],
            [(20, 2), (5, 3), (31, 1)],
            [(40, 1)] * 16,
            [(600, 1), (3, 4)],
        ):
            step = caches.step(spans)
            check(layers, model, [step] * 4)
            assert step.num_rows in layers.captures
    assert layers.refusal is None


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Have torch work on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# More than there are cores, too: threads that are not there when something is shared are not waited for. Two threads
# wait for each other, for long where other processes have the cores: one format by default.
@pytest.mark.parametrize(
    ("weights", "threads"),
    [
        pytest.param(weights, threads, marks=pytest.mark.slow if threads == 2 and weights != "int4" else [])
        for weights in FORMATS
        for threads in (2, 3, 16)
    ],
    indirect=["threads"],
)
@torch.inference_mode()
def test_threads_that_stay_together_give_the_bits_of_others(weights: str, threads: int) -> None:
    level = [*LIBRARIES][-1]
    model = Model(native_ops(level, weights), width=4)
    layers = captured(model)
    caches = Caches()
    for spans in ([(37, 1)], [(700, 2), (5, 3), (600, 1)], [(40, 1)] * 30):
        check(layers, model, [caches.step(spans, seed) for seed in (0, 0, *range(30 if threads < 16 else 5))])
    assert torch.get_num_threads() == threads
    assert len(layers.captures) == 3


@torch.inference_mode()
def test_sequences_and_tables_change_between_replays() -> None:
    """Of as many rows: other sequences, other lengths, other blocks; rows of one sequence, or of several."""
    model = Model(native_ops("portable", "int8"))
    layers = captured(model)
    caches = Caches()
    kinds = ([(40, 1), (30, 1), (20, 1), (700, 1)], [(9, 1), (31, 1), (2, 1), (699, 1)], [(5, 4)], [(0, 2), (16, 2)])
    steps = [caches.step(spans, seed) for seed, spans in enumerate((*kinds, [(600, 1), (2, 3)], *kinds))]
    check(layers, model, [steps[0], *steps])
    assert list(layers.captures) == [4]


@torch.inference_mode()
def test_sequences_that_share_blocks_are_planned_anew() -> None:
    """A replay's plan is made in place of the one before: jobs, pieces and kept results must not mix."""
    model = Model(native_ops("portable", "plain"))
    layers = captured(model)
    caches = Caches()
    alone, short = caches.step([(1100, 1)] * 3), caches.step([(2, 1), (1, 1), (0, 1)])
    shared, longer = caches.step([(1050, 1)] * 3, num_shared=60), caches.step([(1160, 1), (1160, 1), (1000, 1)], 5, 9)
    check(layers, model, [short, short, alone, shared, short, shared, longer, alone, short])
    assert list(layers.captures) == [3]


@torch.inference_mode()
def test_what_a_step_gave_is_not_overwritten() -> None:
    layers = captured(Model(native_ops("portable", "plain")))
    step = Caches().step(SPANS)
    given = [step.run(layers, seed)[0] for seed in range(5)]
    assert list(layers.captures) == [2]
    assert len({hidden.data_ptr() for hidden in given}) == 5
    for seed, hidden in enumerate(given):
        assert torch.equal(hidden, step.run(layers, seed)[0])


@torch.inference_mode()
def test_only_steps_that_come_twice_and_have_few_rows() -> None:
    layers = captured(Model(native_ops("portable", "plain")))
    caches = Caches()
    one, two, many = (caches.step([(4, rows)]) for rows in (1, 2, MAX_ROWS + 1))
    for step in (one, two, one, two, many, many, many):
        step.run(layers)
    assert not layers.captures
    for step in (one, one, two, two):
        step.run(layers)
    assert list(layers.captures) == [1, 2]


@torch.inference_mode()
def test_memory_is_what_the_largest_step_holds_at_a_time() -> None:
    model, caches = Model(native_ops("portable", "plain")), Caches()
    one, many = captured(model), captured(model)
    for layers, counts in ((one, [MAX_ROWS]), (many, [1, 2, 5, MAX_ROWS, 9, 3])):
        for rows in counts:
            check(layers, model, [caches.step([(4, rows)])] * 3)
        assert set(layers.captures) == {*counts}
        # Two layers' tensors are 50 times as wide as rows; a few are held at a time.
        assert 0 < layers.buffers.num_bytes < MAX_ROWS * WIDTH * 2 * 13


def test_memory_is_lent_again_when_nobody_holds_it() -> None:
    buffers = BufferPool()
    first, second = (buffers.take((2, 8), torch.float32, 2) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    place, total = first.data_ptr(), buffers.num_bytes
    assert total == 2 * MAX_ROWS * 8 * 4
    del first
    again = buffers.take((MAX_ROWS, 16), torch.bfloat16, MAX_ROWS)
    assert (again.data_ptr(), buffers.num_bytes) == (place, total)
    assert buffers.take((1, 1), torch.bfloat16, 1).data_ptr() not in (place, second.data_ptr())


@pytest.mark.parametrize(
    ("between", "name"),
    [
        (lambda x: x * 0.5, "aten.mul"),
        (lambda x: x.mul_(0.5), "aten.mul_"),
        (lambda x: x[:, :WIDTH], "aten."),
        (lambda x: x.contiguous().clone(), "aten.clone"),
        (lambda x: torch.tensor(x.tolist(), dtype=x.dtype), "aten."),
    ],
    ids=["product", "in-place", "view", "copy", "read"],
)
@torch.inference_mode()
def test_layers_that_ask_torch_for_anything_are_not_captured(between: Callable[[Tensor], Tensor], name: str) -> None:
    model = Model(native_ops("portable", "plain"), between)
    layers = captured(model)
    check(layers, model, [Caches().step(SPANS)] * 4)
    assert layers.refusal is not None
    assert name in layers.refusal
    assert not layers.captures
    assert layers.buffers.num_bytes == 0


@torch.inference_mode()
def test_a_view_is_not_written_over_by_what_comes_behind_it() -> None:
    """The step that turns out not to be captured has the right result, too."""
    ops = native_ops("portable", "plain")
    wide = ops.pack_linear(randn(2 * WIDTH, WIDTH, dtype=torch.bfloat16, seed=9))
    scale = randn(WIDTH, dtype=torch.bfloat16, seed=10)

    def between(x: Tensor) -> Tensor:
        half = wide(x)[:, WIDTH:]  # of what nobody else holds
        others = [wide(x * 2.0) for _ in range(4)]
        return ops.rms_norm(half, scale, 1e-6) + others[0][:, :WIDTH]

    model = Model(ops, between)
    layers = captured(model)
    check(layers, model, [Caches().step(SPANS)] * 3)
    assert layers.refusal is not None


@torch.inference_mode()
def test_kernels_that_cannot_be_noted_are_not_captured() -> None:
    ops = native_ops("portable", "plain")
    logits, mask = randn(1, 64), torch.full((2,), -1, dtype=torch.int32)

    def between(x: Tensor) -> Tensor:
        ops.apply_token_bitmask(logits, [0], [mask])
        return x

    model = Model(ops, between)
    layers = captured(model)
    check(layers, model, [Caches().step(SPANS)] * 3)
    assert layers.refusal is not None
    assert not layers.captures


@torch.inference_mode()
def test_an_error_leaves_nothing_behind() -> None:
    fails = [False]

    def between(x: Tensor) -> Tensor:
        if fails[0]:
            raise ValueError("no more")
        return x

    model = Model(native_ops("portable", "plain"), between)
    layers = captured(model)
    step = Caches().step(SPANS)
    step.run(layers)
    fails[0] = True
    for _ in range(2):
        with pytest.raises(ValueError, match="no more"):
            step.run(layers)
    fails[0] = False
    assert not layers.captures
    check(layers, model, [step] * 3)
    assert layers.refusal is None
    assert list(layers.captures) == [2]


@torch.inference_mode()
def test_other_caches_are_captured_anew_and_none_is_kept() -> None:
    model = Model(native_ops("portable", "plain"))
    layers = captured(model)
    for num_blocks in (30, 40):
        step = Caches(num_blocks).step(SPANS)
        check(layers, model, [step] * 3)
    memory = [weakref.ref(storage.data) for storage in step.caches.storages]
    del step
    gc.collect()
    assert [each() for each in memory] == [None, None]


@torch.inference_mode()
def test_another_window_is_captured_anew() -> None:
    model = Model(native_ops("portable", "plain"))
    layers = captured(model)
    caches = Caches()
    far, near = (caches.step(SPANS, window=window) for window in (9, 3))
    check(layers, model, [far, far, far, near, near, near, far, far])
    assert not torch.equal(far.run(layers)[0], near.run(layers)[0])


def test_nothing_is_captured_without_native_kernels() -> None:
    assert not isinstance(TorchOps(CPU), Captures)
    assert not isinstance(make_ops(CPU, "torch"), Captures)
