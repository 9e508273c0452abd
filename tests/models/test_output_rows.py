"""Rows whose hidden states are not needed are left out of the last layers; the other rows do not change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.models.families import build
from quire.models.modules.decoder import Decoder
from quire.models.specs.spec import GatedMLP, LayerSpec, ModelSpec, Parallel
from quire.ops import make_ops
from quire.ops.interface.ops import Linear, Ops
from tests.models.stored_tensors import stored_tensors
from tests.models.test_conformance import assert_same
from tests.models.test_decoder import LARGE, NORM, SMALL
from tests.models.tiny import CASES, SHAPE, PagedRun, fill, make_tiny, random_tokens
from tests.ops.backends import LIBRARIES

CPU = torch.device("cpu")
# Cold prompts, later chunks and single tokens share steps; of some all rows are read, of others the last, or the last
# four as of drafts, or none. In the third step nobody reads any.
STEPS: list[tuple[dict[int, int], dict[int, int]]] = [
    ({0: 16, 1: 1}, {0: 0, 1: 1}),
    ({0: 1, 1: 5, 2: 33}, {0: 1, 1: 4, 2: 0}),
    ({0: 9, 2: 3}, {0: 0, 2: 0}),
    ({2: 20, 0: 30}, {2: 20, 0: 1}),
    ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 0, 2: 1}),
    ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}),
]


def run_both(decoder: Decoder, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Return the logits of read rows, and the same rows' where all rows are computed, of a run for each."""
    prompts = {seq_id: random_tokens(64, seq_id) for seq_id in range(3)}
    run, twin = PagedRun(decoder, device=device), PagedRun(decoder, device=device)
    starts, pairs = dict.fromkeys(prompts, 0), []
    for counts, read in STEPS:
        rows = {seq_id: prompts[seq_id][starts[seq_id] :][:count] for seq_id, count in counts.items()}
        starts |= {seq_id: starts[seq_id] + count for seq_id, count in counts.items()}
        found, expected = run.step(rows, read), twin.step(rows)
        for seq_id, count in read.items():
            assert len(found[seq_id]) == count
            pairs.append((found[seq_id], expected[seq_id][len(rows[seq_id]) - count :]))
    return pairs


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_read_are_the_same(name: str, device: str) -> None:
    for found, expected in run_both(make_tiny(name, device=device).decoder, device):
        assert found.isfinite().all()
        if len(found):
            assert_same(found, expected)


@pytest.mark.skipif(not LIBRARIES, reason="no native kernels were built")
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3", "gemma3", "qwen3-moe"])
def test_with_deterministic_kernels_they_are_the_same_bits(name: str, quantization: Any) -> None:
    tiny = make_tiny(name)
    spec, weight_map = build(tiny.config)
    ops = make_ops(CPU, quantization=quantization, deterministic=True)
    decoder = Decoder(spec, ops=ops, dtype=torch.bfloat16, device=CPU)
    tensors = stored_tensors(tiny.reference)
    fill(decoder, weight_map, {key: tensor.bfloat16() for key, tensor in tensors.items()})
    for found, expected in run_both(decoder):
        assert torch.equal(found, expected)


class CountingOps:
    """Kernels that note how many rows linear layers are given, call by call."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.num_rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack_linear(self, *args: Any, **options: Any) -> Linear:
        linear = self._ops.pack_linear(*args, **options)

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            self.num_rows.append(len(x))
            return linear(x, residual)

        return run


# Linear layers that see all rows, and those that see only what is read, the head among them.
@pytest.mark.parametrize(
    ("name", "num_whole", "num_read"),
    [
        ("qwen3", 4 + 1, 3 + 1),
        # The last four layers read what others keep; before the first, all of them are told of the tokens.
        ("gemma4", 1 + 3 * 6 + 1, 5 + 4 * 6 + 1),
        # The last layer has both mixers, a short convolution, a state space, a delta net.
        ("falcon-h1", 2 * 6 + 2, 4 + 1),
        ("lfm2-options", 2 * 4 + 1, 3 + 1),
        ("granite4", 3 * 4 + 1, 3 + 1),
        ("qwen3.5-options", 5 + 1, 3 + 1),
    ],
)
def test_rows_that_are_not_read_are_not_computed(name: str, num_whole: int, num_read: int) -> None:
    tiny = make_tiny(name)
    spec, weight_map = build(tiny.config)
    ops = CountingOps(make_ops(CPU))
    decoder = Decoder(spec, ops=ops, dtype=torch.float32, device=CPU)
    fill(decoder, weight_map, stored_tensors(tiny.reference))
    run = PagedRun(decoder)
    for counts, read, expected in [
        ({0: 11}, {0: 0}, {11: num_whole}),
        ({0: 5, 1: 6}, {0: 1, 1: 2}, {11: num_whole, 3: num_read}),
        ({0: 1, 1: 10}, {0: 1, 1: 10}, {11: num_whole + num_read}),
    ]:
        ops.num_rows.clear()
        run.step({seq_id: random_tokens(count) for seq_id, count in counts.items()}, read)
        assert Counter(count for count in ops.num_rows if count) == expected


def test_layers_side_by_side_of_which_one_keeps_nothing() -> None:
    both = Parallel((LARGE, replace(SMALL, source=0)), (0.5, 2.0))
    layers = tuple(LayerSpec(NORM, mixer, GatedMLP(48)) for mixer in (SMALL, both, replace(SMALL, source=0)))
    spec = ModelSpec(SHAPE["vocab_size"], 32, layers, NORM, True, 64)
    decoder = Decoder(spec, ops=make_ops(CPU), dtype=torch.float32, device=CPU)
    torch.manual_seed(0)
    for name, shape in decoder.weights.shapes().items():
        decoder.weights.load(name, torch.randn(shape) * 0.2)
    assert spec.last_cached_layer == 1
    for found, expected in run_both(decoder):
        assert found.isfinite().all()
        if len(found):
            assert_same(found, expected)
