"""Weights and cache groups of the decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError
from quire.models.modules.decoder import Decoder
from quire.models.specs.rotations import Rope, Temperature
from quire.models.specs.spec import (
    Attention,
    GatedDeltaNet,
    GatedMLP,
    LayerGroup,
    LayerSpec,
    Mamba2,
    Mixer,
    ModelSpec,
    Parallel,
    RMSNorm,
    ShortConv,
    StateCacheShape,
    TokenCacheShape,
)
from quire.ops import make_ops
from tests.models.stored_tensors import stored_tensors
from tests.models.tiny import CASES, make_tiny, with_rows_of_columns

NORM = RMSNorm(1e-6)
SMALL = Attention(4, 2, 16, Rope(1e4))
LARGE = Attention(4, 4, 32, Rope(1e4))


def spec_of(*mixers: Mixer | Parallel, tied_head: bool = False) -> ModelSpec:
    layers = tuple(LayerSpec(NORM, mixer, GatedMLP(48)) for mixer in mixers)
    return ModelSpec(50, 32, layers, NORM, tied_head, 64)


def decoder_of(spec: ModelSpec) -> Decoder:
    cpu = torch.device("cpu")
    return Decoder(spec, ops=make_ops(cpu), dtype=torch.float32, device=cpu)


@pytest.mark.parametrize("name", CASES)
def test_every_weight_has_a_source_of_its_shape(name: str) -> None:
    """Ours and the checkpoint's parameters are the same numbers, each exactly once."""
    tiny = make_tiny(name)
    tensors = with_rows_of_columns(tiny.config["architectures"][0], stored_tensors(tiny.reference))
    if not tiny.config.get("altup_correct_scale", True):  # stored all the same
        tensors = {source: tensor for source, tensor in tensors.items() if "correct_output_scale" not in source}
    shapes = tiny.decoder.weights.shapes()
    assert shapes.keys() == tiny.weight_map.keys()
    for weight, shape in shapes.items():
        parts = [tensors[source] for source in tiny.weight_map[weight]]
        if parts[0].dim() > len(shape):  # all experts of a layer, read as the rows of all
            parts = [part.flatten(0, 1) for part in parts]
        assert shape == (sum(len(part) for part in parts), *parts[0].shape[1:])
    # Keys and values may be made of the same.
    used = [source for sources in tiny.weight_map.values() for source in dict.fromkeys(sources)]
    assert sorted(used) == sorted(tensors)
    assert tiny.decoder.weights.missing == ()


def test_layers_of_one_shape_share_a_cache_group() -> None:
    spec = spec_of(SMALL, LARGE, SMALL, replace(SMALL, num_heads=2))
    assert spec.cache_groups == (LayerGroup(3, TokenCacheShape(2, 16)), LayerGroup(1, TokenCacheShape(4, 32)))
    assert spec.cache_positions == (((0, 0),), ((1, 0),), ((0, 1),), ((0, 2),))
    assert decoder_of(spec).cache_groups == spec.cache_groups


def test_layers_with_another_window_or_chunk_are_another_cache_group() -> None:
    near, far, chunked = replace(SMALL, window=8), replace(SMALL, window=32), replace(SMALL, chunk=8)
    spec = spec_of(near, SMALL, near, far, near, chunked)
    assert spec.cache_groups == (
        LayerGroup(3, TokenCacheShape(2, 16, 8)),
        LayerGroup(1, TokenCacheShape(2, 16)),
        LayerGroup(1, TokenCacheShape(2, 16, 32)),
        LayerGroup(1, TokenCacheShape(2, 16, None, 8)),
    )
    assert spec.cache_positions == (((0, 0),), ((1, 0),), ((0, 1),), ((2, 0),), ((0, 2),), ((3, 0),))


def test_groups_of_states_come_after_those_of_tokens() -> None:
    conv, mamba = ShortConv(32, 3), Mamba2(2, 8, 1, 16, 4, NORM)
    spec = spec_of(conv, mamba, SMALL, conv, replace(SMALL, window=8))
    assert spec.cache_groups == (
        LayerGroup(1, TokenCacheShape(2, 16)),
        LayerGroup(1, TokenCacheShape(2, 16, 8)),
        LayerGroup(2, StateCacheShape(2, 32)),
        LayerGroup(1, StateCacheShape(3, 48, (2, 8, 16))),
    )
    assert spec.cache_positions == (((2, 0),), ((3, 0),), ((0, 0),), ((2, 1),), ((1, 0),))


def test_a_delta_net_keeps_a_matrix_of_each_value_head() -> None:
    spec = spec_of(SMALL, GatedDeltaNet(2, 6, 8, 16, 4, NORM))
    assert spec.cache_groups[1] == LayerGroup(1, StateCacheShape(3, 2 * 2 * 8 + 6 * 16, (6, 8, 16)))
    shapes = decoder_of(spec).weights.shapes()
    assert shapes["layers.1.mixer.input.weight"] == (2 * 2 * 8 + 6 * 16 + 6 * 16 + 6 + 6, 32)
    assert shapes["layers.1.mixer.conv.weight"] == (2 * 2 * 8 + 6 * 16, 1, 4)


def test_gates_are_stored_with_the_queries() -> None:
    shapes = decoder_of(spec_of(replace(SMALL, output_gate=True, qkv_bias=True))).weights.shapes()
    assert shapes["layers.0.mixer.qkv.weight"] == ((2 * 4 + 2 * 2) * 16, 32)
    assert shapes["layers.0.mixer.qkv.bias"] == ((2 * 4 + 2 * 2) * 16,)
    assert shapes["layers.0.mixer.output.weight"] == (32, 4 * 16)


@pytest.mark.parametrize(
    "change",
    [
        {"output_gate": True},
        {"rope": Rope(1e4, num_turned=8)},
        {"rope": Rope(1e4, interleaved=True)},
        {"temperature": Temperature(8.0, 0.1)},
        {"qk_norm": RMSNorm(1e-6, learned=False)},
        {"qk_norm": RMSNorm(1e-6), "joint_qk_norm": True},
    ],
    ids=str,
)
def test_layers_that_share_a_cache_norm_and_rotate_whole_heads(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        decoder_of(spec_of(SMALL, replace(SMALL, source=0, **change)))


def test_a_layer_is_in_the_cache_group_of_each_of_its_parts() -> None:
    mamba = Mamba2(2, 8, 1, 16, 4, NORM)
    both = Parallel((mamba, SMALL), (0.5, 2.0))
    spec = spec_of(both, SMALL, both, Parallel((SMALL, LARGE), (1.0, 1.0)))
    assert spec.cache_groups == (
        LayerGroup(4, TokenCacheShape(2, 16)),
        LayerGroup(1, TokenCacheShape(4, 32)),
        LayerGroup(2, StateCacheShape(3, 48, (2, 8, 16))),
    )
    assert spec.cache_positions == (((2, 0), (0, 0)), ((0, 1),), ((2, 1), (0, 2)), ((0, 3), (1, 0)))
    decoder = decoder_of(spec)
    assert decoder.cache_groups == spec.cache_groups
    shapes = decoder.weights.shapes()
    assert shapes["layers.0.mixer.1.qkv.weight"] == shapes["layers.1.mixer.qkv.weight"] == (8 * 16, 32)
    assert shapes["layers.0.mixer.0.A_log"] == (2,)


def test_a_layer_that_reads_another_ones_cache_keeps_nothing() -> None:
    near = replace(SMALL, window=8)
    spec = spec_of(near, SMALL, near, replace(SMALL, source=1), replace(near, source=2), replace(near, source=0))
    assert spec.cache_groups == (LayerGroup(2, TokenCacheShape(2, 16, 8)), LayerGroup(1, TokenCacheShape(2, 16)))
    assert spec.cache_positions == (((0, 0),), ((1, 0),), ((0, 1),), ((1, 0),), ((0, 1),), ((0, 0),))


@pytest.mark.parametrize("other", [replace(SMALL, window=8), LARGE])
def test_a_cache_of_another_shape_cannot_be_read(other: Attention) -> None:
    with pytest.raises(AssertionError, match="another shape"):
        _ = spec_of(SMALL, replace(other, source=0)).cache_positions


def test_a_tied_head_is_no_weight_of_its_own() -> None:
    assert "head.weight" in decoder_of(spec_of(SMALL)).weights.shapes()
    assert "head.weight" not in decoder_of(spec_of(SMALL, tied_head=True)).weights.shapes()


def test_a_wrong_weight_is_refused() -> None:
    decoder = decoder_of(spec_of(SMALL))
    with pytest.raises(CheckpointError, match=r"no weight 'layers\.9\.ffn\.down\.weight'"):
        decoder.weights.load("layers.9.ffn.down.weight", torch.zeros(32, 48))
    with pytest.raises(CheckpointError, match=r"ffn.down.weight must be of shape \[32, 48\].*got \[48, 32\]"):
        decoder.weights.load("layers.0.ffn.down.weight", torch.zeros(48, 32))
    with pytest.raises(CheckpointError, match=r"torch.float32, got .*torch.bfloat16"):
        decoder.weights.load("layers.0.ffn.down.weight", torch.zeros(32, 48, dtype=torch.bfloat16))
    assert "layers.0.ffn.down.weight" in decoder.weights.missing
    decoder.weights.load("layers.0.ffn.down.weight", torch.zeros(32, 48))
    assert "layers.0.ffn.down.weight" not in decoder.weights.missing
    with pytest.raises(CheckpointError, match="loaded before"):
        decoder.weights.load("layers.0.ffn.down.weight", torch.zeros(32, 48))
