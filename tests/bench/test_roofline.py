"""The least work of a step, counted by hand and against the slow way."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.measurement.bench.roofline import (
    AttentionShape,
    ModelShape,
    Rates,
    StepWork,
    least_s,
    seen_by_rows,
    seen_of_cache,
    step_work,
)
from quire.measurement.simulation.replicas.step_time import StepItem
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import load_decoder
from quire.models.specs.spec import Attention, Experts, GatedMLP, LayerSpec, Mamba2, ModelSpec, RMSNorm

# 1000 parameters in layers, 120 of them behind the last keys and values, 300 in the head, two bytes each; 3 layers of 4
# heads over 2 KV heads of 8 values.
FULL = ModelShape(
    880, 120, 300, 2, (2, 2), ((AttentionShape(4, 2, 8, None), 2),), ((AttentionShape(4, 2, 8, None), 1),)
)
WINDOWED = FULL._replace(
    attention=((AttentionShape(4, 2, 8, 10), 2),), late_attention=((AttentionShape(4, 2, 8, 10), 1),)
)


def test_a_decode_step_reads_weights_and_the_cache_of_each_sequence() -> None:
    work = step_work(FULL, [StepItem(50, 1, 1), StepItem(7, 1, 1)])
    assert work.weight_bytes == 2 * (1000 + 300)
    assert work.cache_bytes == 2 * (2 * 3 * 2 * 8) * (50 + 7)
    # Each row sees itself too: 51 and 8 tokens, a product with the key and one with the value.
    assert work.operations == 2 * 2 * (1000 + 300) + 3 * 4 * (2 * 8 * 2) * (51 + 8)


def test_a_chunk_of_a_prompt_needs_no_head_and_sees_a_triangle() -> None:
    work = step_work(FULL, [StepItem(0, 4, 0)])
    assert (work.weight_bytes, work.cache_bytes) == (2 * 880, 0)
    assert work.operations == 2 * 4 * 880 + 2 * 4 * (2 * 8 * 2) * (1 + 2 + 3 + 4)


def test_after_the_last_cached_layer_only_output_rows_are_counted() -> None:
    work = step_work(FULL, [StepItem(5, 4, 2), StepItem(7, 9, 0)])
    assert work.weight_bytes == 2 * (1000 + 300)
    assert work.operations == 2 * (13 * 880 + 2 * (120 + 300)) + 4 * (4 * 8) * (
        2 * (sum(range(6, 10)) + sum(range(8, 17))) + 8 + 9
    )
    assert work.cache_bytes == 2 * (2 * 2 * 8) * (2 * (5 + 7) + 5)
    # The first row that is read is at position 7 and sees 7 before it, 2 of them of this step; of its chunk one.
    late = FULL._replace(attention=())
    windowed, chunked = (AttentionShape(4, 2, 8, *sight) for sight in ((10,), (None, 6)))
    for shape, num_seen, num_cached in ((windowed, 8 + 9, 5), (chunked, 2 + 3, 0)):
        found = step_work(late._replace(late_attention=((shape, 1),)), [StepItem(5, 4, 2)])
        assert found.cache_bytes == 2 * (2 * 2 * 8) * num_cached
        assert found.operations == 2 * (4 * 880 + 2 * (120 + 300)) + 4 * (4 * 8) * num_seen
    narrow = step_work(late._replace(late_attention=((AttentionShape(4, 2, 8, 4), 1),)), [StepItem(5, 4, 2)])
    assert narrow.cache_bytes == 2 * (2 * 2 * 8) * 1


def test_what_has_left_the_window_is_not_read() -> None:
    work = step_work(WINDOWED, [StepItem(50, 1, 1)])
    assert work.cache_bytes == 2 * (2 * 3 * 2 * 8) * 9
    assert work.operations == 2 * (1000 + 300) + 3 * 4 * (2 * 8 * 2) * 10


def test_rounded_weights_are_fewer_bytes_and_as_many_operations() -> None:
    norm, weights = RMSNorm(1e-5), {"layers.0.mixer.qkv.weight": (32, 32), "layers.0.ffn.down.weight": (32, 68)}
    weights["head.weight"] = (100, 32)
    attention = Attention(num_heads=2, num_kv_heads=1, head_dim=8, rope=None)
    spec = ModelSpec(100, 32, (LayerSpec(norm, attention, GatedMLP(64)),), norm, False, 512)
    item = StepItem(50, 1, 1)
    plain, *rounded = (
        step_work(ModelShape.of(spec, weights, 2, quantization), [item]) for quantization in (None, "int8", "int4")
    )
    assert [work.weight_bytes for work in (plain, *rounded)] == [
        2 * 6400,
        pytest.approx(6400 * 17 / 16 + 3200 / 16 * 2048 / 7680, abs=2),  # of 7680 projected, 2048 in groups of 16
        3200 * 9 // 16 + 3200 * 13 // 16,
    ]
    assert all(work._replace(weight_bytes=plain.weight_bytes) == plain for work in rounded)


def test_a_token_goes_past_the_experts_that_it_is_not_sent_to() -> None:
    norm, attention = RMSNorm(1e-5), Attention(num_heads=2, num_kv_heads=1, head_dim=8, rope=None)
    layer = LayerSpec(norm, attention, Experts(num_experts=8, num_chosen=2, width=16))
    weights = {"layers.0.mixer.qkv.weight": (32, 32)}
    weights |= {"layers.0.ffn.gate_up.weight": (8 * 32, 32), "layers.0.ffn.down.weight": (8 * 32, 16)}
    model = ModelShape.of(ModelSpec(100, 32, (layer,), norm, False, 512), weights, 2)
    # Keys and values of one head; queries of two.
    assert (model.num_body, model.num_tail) == (2 * 8 * 32, 2 * 3 * 16 * 32 + 2 * 8 * 32)


@pytest.mark.parametrize("chunk", [1, 4, 30])
def test_what_rows_see_of_their_chunks(chunk: int) -> None:
    for start, count in itertools.product(range(9), range(1, 9)):
        seen = [range(row // chunk * chunk, row + 1) for row in range(20)]
        assert seen_by_rows(start, count, None, chunk) == sum(map(len, seen[start : start + count]))
        assert seen_of_cache(start, None, chunk) == len(seen[start]) - 1


@pytest.mark.parametrize("window", [None, 1, 2, 5, 30])
def test_what_rows_see_is_the_sum_of_what_each_sees(window: int | None) -> None:
    for start, count in itertools.product(range(9), range(1, 9)):
        seen = [range(row + 1) if window is None else range(max(0, row + 1 - window), row + 1) for row in range(20)]
        rows = seen[start : start + count]
        assert seen_by_rows(start, count, window) == sum(map(len, rows))
        assert seen_of_cache(start, window) == len([place for place in seen[start] if place < start])


def test_states_are_read_where_there_are_some_and_changed_by_every_token() -> None:
    norm = RMSNorm(1e-5)
    mixer = Mamba2(num_heads=4, head_dim=8, num_groups=1, state_dim=16, kernel=4, norm=norm)
    spec = ModelSpec(100, 32, (LayerSpec(norm, mixer, GatedMLP(64)),) * 2, norm, False, 512)
    model = ModelShape.of(spec, {"layers.0.ffn.down.weight": (10, 20), "head.weight": (100, 32)}, 2)
    assert (model.num_body, model.num_tail, model.num_head, model.attention) == (200, 0, 3200, ())
    # Two layers: four heads of 8 x 16 values in float32, and three inputs of 4 * 8 + 2 * 16 channels.
    assert model.state_bytes == 2 * (4 * (4 * 8 * 16) + 2 * 3 * 64)
    work = step_work(model, [StepItem(9, 1, 1), StepItem(0, 5, 0)])
    assert work.cache_bytes == model.state_bytes
    assert work.operations == 2 * (6 * 200 + 3200) + 4 * 6 * (2 * 4 * 8 * 16)


def test_the_bundled_model_is_counted_whole() -> None:
    checkpoint = Checkpoint.open("bundled", None)
    decoder = load_decoder(checkpoint, device="cpu", dtype=torch.float32)
    model = ModelShape.of(decoder.spec, decoder.weights.shapes(), 4)
    config = json.loads((Path(checkpoint.folder) / "config.json").read_text())
    width, inner, num_layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    # Queries and output, keys and values of half as many heads, three matrices of the FFN; norms.
    layer = width * width * 2 + width * width // 2 * 2 + 3 * width * inner + 2 * width
    assert model.num_body + model.num_tail == num_layers * layer + width
    # All of the last layer but its first norm, its keys and values; the last norm.
    assert model.num_tail == layer - width - width * width // 2 * 2 + width
    assert model.num_head == config["vocab_size"] * width
    shape = AttentionShape(8, 4, 32, None)
    assert (model.attention, model.late_attention) == (((shape, 3),), ((shape, 1),))


def test_layers_that_read_what_others_keep_compute_for_the_head_alone() -> None:
    norm, full = RMSNorm(1e-5), Attention(num_heads=2, num_kv_heads=1, head_dim=8, rope=None)
    layers = tuple(LayerSpec(norm, replace(full, source=source), GatedMLP(64)) for source in (None, 0))
    weights = {
        "layers.0.mixer_norm.weight": (32,),
        "layers.0.mixer.qkv.weight": (32, 32),
        "layers.0.mixer.output.weight": (32, 16),
        "layers.0.mixer.output.norm.weight": (32,),
        "layers.0.ffn.down.weight": (32, 64),
        "layers.1.mixer_norm.weight": (32,),
        "layers.1.mixer.q.weight": (16, 32),
        "norm.weight": (32,),
    }
    model = ModelShape.of(ModelSpec(100, 32, layers, norm, False, 512), weights, 2)
    assert model.num_body == 32 + 2 * 8 * 32
    assert model.num_tail == sum(map(math.prod, weights.values())) - model.num_body
    assert (model.attention, model.late_attention) == ((), ((AttentionShape(2, 1, 8, None), 2),))


def test_the_slower_one_of_reading_and_computing_bounds_a_step() -> None:
    rates = Rates(read_bytes_per_s=100.0, operations_per_s=1000.0)
    assert least_s(StepWork(150, 50, 500), rates) == 2.0
    assert least_s(StepWork(10, 0, 5000), rates) == 5.0
