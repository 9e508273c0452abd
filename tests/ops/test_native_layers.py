"""Fused layers give the bits of the layers one by one, and layers with other parts are not fused."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config import Quantization
from quire.execution.step.kv_storage import KVStorage, StateStorage
from quire.ops.cpu.native_layers import NativeLayers
from quire.ops.cpu.native_library import LEVELS, MAX_ROWS, NativeLibrary
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.fused_layers import (
    PackedAttention,
    PackedLayer,
    PackedMLP,
    PackedRecurrence,
    RoutedExperts,
    RowNorm,
)
from quire.ops.interface.ops import AttentionBatch, HeadNorms, Linear, Rotation, StateBatch
from quire.ops.interface.recurrent_weights import ShortConvWeights
from quire.ops.pytorch.torch_widened import WIDENED, narrowed
from tests.ops.backends import LIBRARIES
from tests.ops.test_recurrent_mixers import DELTA_SHAPE, SHORT_SHAPE, delta_weights, short_conv_weights
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
    roundings: dict[str, Quantization] = {"int8": "int8", "int4": "int4"}
    return NativeOps(NativeLibrary(level, LIBRARIES[level]), roundings.get(weights), is_lossless=weights == "lossless")


class Model:
    """Four layers of two cache groups: with and without norms of heads, biases, sinks, and soft caps of scores.

    Args:
        width: how many times wider the gates are than rows.
        mlp_width: width of the gates of the last layer, where it differs.
        is_hybrid: attention has gates, and a gated delta net and a short convolution come between; half of the layers
            have experts, one with a shared expert.
    """

    def __init__(self, ops: NativeOps, width: int = 1, mlp_width: int | None = None, is_hybrid: bool = False) -> None:
        self.ops = ops
        self.layers = []
        for idx in range(4):
            norm = RowNorm(randn(WIDTH, dtype=torch.float32 if idx % 2 else torch.bfloat16, seed=idx), 1e-6)
            columns = width * WIDTH * 2 if idx < 3 or mlp_width is None else mlp_width
            ffn = self._experts(idx) if is_hybrid and idx % 2 else self._mlp(idx, columns)
            attention = self._attention(idx, has_gate=is_hybrid)
            self.layers.append(PackedLayer(norm, attention, idx % 2, idx // 2, (idx + 1) % 2, norm, ffn))
            if is_hybrid and idx % 2 == 0:
                state = PackedLayer(norm, self._recurrence(idx), 2 + idx // 2, 0, 0, norm, self._mlp(idx, columns))
                self.layers.append(state)

    def _attention(self, idx: int, has_gate: bool) -> PackedAttention:
        head_norms = HeadNorms(randn(HEADS + KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, seed=idx + 4), 1e-5)
        qkv = self._linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH, 10 * idx + 2, has_bias=idx > 1)
        output = self._linear(WIDTH, HEADS * HEAD_DIM, 10 * idx + 3)
        norms = head_norms if idx < 3 else None
        sinks = randn(HEADS, seed=idx) * 3 if idx % 2 else None
        gate = self._linear(HEADS * HEAD_DIM, WIDTH, 10 * idx + 6) if has_gate else None
        return PackedAttention(qkv, output, norms, HEADS, 0.25, sinks, gate, 0.7 if idx > 1 else None)

    def _recurrence(self, idx: int) -> PackedRecurrence:
        weights = short_conv_weights(has_bias=True) if idx else delta_weights()
        shape = SHORT_SHAPE if idx else DELTA_SHAPE
        inner = weights.taps.shape[1] if idx else shape.sums[0] * shape.sums[2]
        num_inputs = 3 * inner if idx else shape.num_channels + inner + 2 * shape.sums[0]
        return PackedRecurrence(
            self._linear(num_inputs, WIDTH, 10 * idx + 7), self._linear(WIDTH, inner, 10 * idx + 8), weights
        )

    def _mlp(self, idx: int, columns: int) -> PackedMLP:
        gate_up = self._linear(2 * columns, WIDTH, 10 * idx + 4, gate="silu" if idx else "gelu_tanh")
        return PackedMLP(gate_up, self._linear(WIDTH, columns, 10 * idx + 5, has_bias=idx < 2))

    def _experts(self, idx: int) -> RoutedExperts:
        mlps = [self._mlp(idx + expert, WIDTH) for expert in range(5)]
        router = self._linear(5, WIDTH, idx + 9)
        has_shared = idx > 1
        shared, gate = (self._mlp(idx + 9, WIDTH), self._linear(1, WIDTH, idx)) if has_shared else (None, None)
        parts = [mlp.gate_up for mlp in mlps], [mlp.down for mlp in mlps]
        return RoutedExperts(
            router, *parts, 2, None, None, False, True, False, 0.0, 1.0, 1.0, shared, gate, len(parts[0])
        )

    def _linear(self, num_outputs: int, width: int, seed: int, has_bias: bool = False, gate: Any = None) -> Linear:
        weight = randn(num_outputs, width, dtype=torch.bfloat16, seed=seed) * width**-0.5
        bias = randn(num_outputs, dtype=torch.bfloat16, seed=seed + 50) if has_bias else None
        return self.ops.pack_linear(weight, bias, gate=gate)

    def __call__(
        self, x: Tensor, rotations: Sequence[Rotation], groups: Sequence[Any], storages: Sequence[Any]
    ) -> Tensor:
        """Run the layers one by one."""
        steps = [
            self.ops.step_states(*group) if isinstance(group[0], StateBatch) else self.ops.step_attention(*group)
            for group in zip(groups, storages, strict=True)
        ]
        for layer in self.layers:
            rows = self.ops.rms_norm(x, *layer.mixer_norm)
            x = layer.mixer.output(self._mix(layer, rows, steps[layer.group_idx], rotations[layer.rotation_idx]), x)
            rows = self.ops.rms_norm(x, *layer.ffn_norm)
            if isinstance(layer.ffn, PackedMLP):
                x = layer.ffn.down(layer.ffn.gate_up(rows), x)
            else:
                experts = self.ops.fuse_experts(layer.ffn)
                assert experts is not None
                x = experts(rows, rows, x)
        return x

    def _mix(self, layer: PackedLayer, rows: Tensor, step: Any, rotation: Rotation) -> Tensor:
        mixer = layer.mixer
        if isinstance(mixer, PackedRecurrence):
            run = step.short_conv if isinstance(mixer.weights, ShortConvWeights) else step.gated_delta_net
            return run(layer.layer_idx, mixer.input(rows), mixer.weights)  # type: ignore[no-any-return]
        queries = step.prepare(layer.layer_idx, mixer.qkv(rows), mixer.head_norms, rotation)
        gathered: Tensor = step.attend(layer.layer_idx, queries, mixer.score_scale, mixer.sinks, mixer.soft_cap)
        return gathered if mixer.gate is None else self.ops.sigmoid_gate(gathered, mixer.gate(rows))


class Caches:
    """The memory of two cache groups, full of numbers: one of all tokens, one of a window.

    Args:
        has_states: two groups of states are behind them, of a gated delta net and of a short convolution.
    """

    def __init__(self, num_blocks: int = 220, stored: str | None = None, has_states: bool = False) -> None:
        self.num_blocks = num_blocks
        self.storages: list[KVStorage | StateStorage] = []
        for seed in range(2):
            storage = KVStorage(num_blocks, 2, BLOCK, KV_HEADS, HEAD_DIM, torch.bfloat16, CPU, stored=stored)
            fill_slots(storage, seed)
            self.storages.append(storage)
        for shape in (DELTA_SHAPE, SHORT_SHAPE) if has_states else ():
            states = StateStorage(40, 1, shape, torch.bfloat16, CPU)
            for part in (states.conv_states[0], states.ssm_states[0]):
                part.copy_(randn(*part.shape, seed=len(self.storages)))
            self.storages.append(states)
        self.contents = [storage.data.clone() for storage in self.storages]

    def step(self, spans: list[tuple[int, int]], seed: int = 0, num_shared: int = 0, window: int = 9) -> Step:
        """Return a step of sequences with the given stored tokens and rows.

        Args:
            seed: of their blocks.
            num_shared: blocks at the front of every sequence that are the first one's.
        """
        groups: list[AttentionBatch | StateBatch] = [
            self._batch(spans, seed, num_shared, sight) for seed, sight in ((seed, None), (seed + 1, window))
        ]
        for idx in range(2, len(self.storages)):
            ids = random.Random(seed + idx).sample(range(1, 40), len(spans))
            starts = list(accumulate((rows for _, rows in spans), initial=0))
            groups.append(StateBatch(ids, starts, [history > 0 for history, _ in spans]))
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

    def __init__(self, caches: Caches, groups: Sequence[AttentionBatch | StateBatch]) -> None:
        self.caches, self.groups = caches, groups
        self.num_rows = groups[0].row_starts[-1]
        cos, sin = rotation_of(self.num_rows, HEAD_DIM, torch.bfloat16)
        self.rotations = [Rotation(cos, sin), Rotation(sin.abs(), cos)]

    def run(self, layers: Any, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states that layers make of random rows, and what is in the caches behind it."""
        storages = self.caches.storages
        for storage, before in zip(storages, self.caches.contents, strict=True):
            storage.data.copy_(before)
        x = randn(self.num_rows, WIDTH, dtype=torch.bfloat16, seed=seed)
        hidden = layers(x, self.rotations, self.groups, storages)
        assert hidden is not None
        return hidden, [storage.data.view(torch.uint8).clone() for storage in storages]


def assert_same(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[0].isfinite().all()
    assert all(torch.equal(*caches) for caches in zip(found[1], expected[1], strict=True))


def fused(model: Model) -> NativeLayers:
    assert isinstance(model.ops, NativeOps)
    made = model.ops.fuse_layers(model.layers)
    assert made is not None
    return made


def check(layers: NativeLayers, model: Model, steps: Iterable[Step]) -> None:
    """Run steps with both, and compare all that they leave."""
    for seed, step in enumerate(steps):
        assert_same(step.run(layers, seed), step.run(model, seed))


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("level", NATIVE_LEVELS)
@torch.inference_mode()
def test_fused_layers_give_the_bits_of_the_layers(level: str, weights: str) -> None:
    model = Model(native_ops(level, weights))
    layers = fused(model)
    for stored in (None, "int8"):
        caches = Caches(stored=stored)
        for spans in (
            [(37, 1)],
            [(0, 1), (15, 1), (63, 1)],
            [(20, 2), (5, 3), (31, 1)],
            [(40, 1)] * 16,
            [(600, 1), (3, 4)],
        ):
            check(layers, model, [caches.step(spans)] * 2)


@pytest.mark.parametrize("weights", ["plain", "int4"])
@pytest.mark.parametrize("level", NATIVE_LEVELS)
@torch.inference_mode()
def test_states_gates_and_experts_give_the_bits_of_the_layers(level: str, weights: str) -> None:
    model = Model(native_ops(level, weights), is_hybrid=True)
    layers = fused(model)
    caches = Caches(has_states=True)
    for spans in ([(37, 1)], [(0, 1), (15, 1), (63, 1)], [(20, 2), (5, 3), (0, MAX_ROWS - 6), (31, 1)]):
        check(layers, model, [caches.step(spans)] * 2)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("level", NATIVE_LEVELS)
@torch.inference_mode()
def test_a_norm_and_a_product_in_one_call_or_in_float32_give_the_bits_of_two(level: str, weights: str) -> None:
    ops = native_ops(level, weights)
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        weight = randn(1000 + seed, WIDTH, dtype=torch.bfloat16, seed=seed)
        linear = ops.pack_linear(weight, randn(1000 + seed, dtype=torch.bfloat16, seed=seed + 2) if seed else None)
        norm = RowNorm(randn(WIDTH, dtype=dtype, seed=seed + 4), 1e-6)
        both = ops.fuse_norm(norm, linear)
        takes_float32 = weights in ("int8", "int4") and seed == 0
        assert (both is None) == takes_float32
        for num_rows in (1, 3, 40):
            x = randn(num_rows, 2 * WIDTH, dtype=torch.bfloat16, seed=num_rows)[:, WIDTH:]  # rows that lie apart
            normed = ops.rms_norm(x, *norm)
            found = linear(normed.float()).bfloat16() if both is None else both(x)
            assert torch.equal(found, linear(normed))


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the number of torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# More than there are cores, too: threads that are not there when something is shared are not waited for. Two threads
# wait for each other, for long where other processes have the cores: few formats by default.
@pytest.mark.parametrize(
    ("weights", "threads"),
    [
        pytest.param(
            weights, threads, marks=[] if (weights, threads) in (("int4", 2), ("plain", 16)) else pytest.mark.slow
        )
        for weights in FORMATS
        for threads in (2, 3, 16)
    ],
    indirect=["threads"],
)
@torch.inference_mode()
def test_threads_that_stay_together_give_the_bits_of_others(weights: str, threads: int) -> None:
    level = [*LIBRARIES][-1]
    model = Model(native_ops(level, weights), width=4, is_hybrid=weights == "plain")
    layers = fused(model)
    caches = Caches(has_states=weights == "plain")
    for spans in ([(37, 1)], [(700, 2), (5, 3), (600, 1)], [(40, 1)] * 30):
        check(layers, model, [caches.step(spans, seed) for seed in (0, 0, *range(30 if threads < 16 else 5))])
    assert torch.get_num_threads() == threads


@torch.inference_mode()
def test_other_sequences_and_caches_of_as_many_rows() -> None:
    """Other sequences, other lengths, other blocks; rows of one sequence, or of several; another storage."""
    model = Model(native_ops("portable", "int8"))
    layers = fused(model)
    kinds = ([(40, 1), (30, 1), (20, 1), (700, 1)], [(9, 1), (31, 1), (2, 1), (699, 1)], [(5, 4)], [(0, 2), (16, 2)])
    for caches in (Caches(), Caches(num_blocks=240)):
        steps = [caches.step(spans, seed) for seed, spans in enumerate((*kinds, [(600, 1), (2, 3)], *kinds))]
        check(layers, model, [steps[0], *steps])


@torch.inference_mode()
def test_sequences_that_share_blocks() -> None:
    model = Model(native_ops("portable", "plain"))
    layers = fused(model)
    caches = Caches()
    alone, short = caches.step([(1100, 1)] * 3), caches.step([(2, 1), (1, 1), (0, 1)])
    shared, longer = caches.step([(1050, 1)] * 3, num_shared=60), caches.step([(1160, 1), (1160, 1), (1000, 1)], 5, 9)
    check(layers, model, [short, alone, shared, short, shared, longer, alone, short])


@torch.inference_mode()
def test_what_a_step_gave_is_not_overwritten() -> None:
    layers = fused(Model(native_ops("portable", "plain")))
    step = Caches().step(SPANS)
    given = [step.run(layers, seed)[0] for seed in range(5)]
    assert len({hidden.data_ptr() for hidden in given}) == 5
    for seed, hidden in enumerate(given):
        assert torch.equal(hidden, step.run(layers, seed)[0])


@torch.inference_mode()
def test_large_steps_and_torch_attention_run_layer_by_layer() -> None:
    layers = fused(Model(native_ops("portable", "plain")))
    for spans, stored in (([(4, MAX_ROWS + 1)], None), ([(4, 1)], "fp8")):
        caches = Caches(stored=stored)
        step = caches.step(spans)
        x = randn(step.num_rows, WIDTH, dtype=torch.bfloat16, seed=0)
        assert layers(x, step.rotations, step.groups, caches.storages) is None
        assert all(map(torch.equal, caches.contents, [storage.data for storage in caches.storages]))


def test_torch_products_and_uneven_heads_are_not_fused() -> None:
    ops = native_ops("portable", "plain")
    (first, *others) = Model(ops).layers
    assert ops.fuse_layers([first, *others]) is not None
    odd = Model(ops, mlp_width=WIDTH + 1).layers  # gates that fill no panel
    assert ops.fuse_layers(odd) is None
    assert isinstance(first.mixer, PackedAttention)
    more_heads = first._replace(mixer=first.mixer._replace(num_heads=2 * HEADS))
    assert ops.fuse_layers([more_heads, *others]) is None
    product = ops.pack_linear(randn(8, WIDTH - 1, dtype=torch.bfloat16, seed=0))  # rows that no kernel takes
    assert ops.fuse_norm(first.mixer_norm, product) is None
    hybrid = Model(ops, is_hybrid=True).layers
    assert ops.fuse_layers(hybrid) is not None
    mixer, experts = hybrid[1].mixer, hybrid[2].ffn
    assert isinstance(mixer, PackedRecurrence)
    assert isinstance(experts, RoutedExperts)
    for other in (
        hybrid[1]._replace(mixer=mixer._replace(input=product)),
        hybrid[0]._replace(mixer=first.mixer._replace(gate=product)),
        hybrid[2]._replace(ffn=experts._replace(router=product)),
    ):
        assert ops.fuse_layers([other]) is None
