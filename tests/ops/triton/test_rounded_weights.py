"""Weights that Triton's backend rounds as they are loaded: the numbers, products and tokens of backends for CPUs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import RequestOutput
from quire.config import Quantization
from quire.ops.interface.ops import KeepsRows
from quire.ops.interface.quantized_weight import WeightForm
from quire.ops.interface.weight_formats import FORMS, WeightFormat
from quire.ops.pytorch.torch_ops import TorchOps
from quire.ops.reference.reference_ops import ReferenceOps
from quire.ops.reference.reference_quantised import ReferenceQuantisedLinear
from tests.conformance.checkpoints import VOCAB_SIZE, save_checkpoint
from tests.ops.test_quantised_linear import FORMATS, assert_extremes, assert_same_numbers, extremes, options_of
from tests.ops.triton.device import DEVICE, MARKS
from tests.ops.triton.test_engine import GREEDY, load
from tests.ops.triton.test_experts import ALL_OPTIONS, WIDTH, make_block
from tests.ops.triton.test_stored_linear import assert_groups_apart, assert_same_bits
from tests.ops.world import randn

from quire.ops.layers.gated import GatedLinear  # isort: skip - the modules above skip where Triton is missing
from quire.ops.triton.linear.routed_experts import TritonExperts  # isort: skip
from quire.ops.triton.linear.stored_experts import StoredExpertLayer  # isort: skip
from quire.ops.triton.linear.stored_linear import TritonQuantizedLinear  # isort: skip
from quire.ops.triton.triton_ops import TritonOps  # isort: skip

pytestmark = MARKS
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_ops(quantization: Quantization) -> TritonOps:
    return TritonOps(torch.device(DEVICE), quantization)


def form_of(linear: Any) -> WeightForm:
    assert isinstance(linear, TritonQuantizedLinear)
    (part,) = linear.parts
    return part.form


@pytest.mark.parametrize("width", [256, 96, 77, 5])
@pytest.mark.parametrize("name", FORMATS)
def test_numbers(name: WeightFormat, width: int) -> None:
    """An even number of groups and odd ones, some not whole, few rows and many that lie apart, bias and residual."""
    quantization, options = options_of(name)
    weight, bias = randn(130, width) * width**-0.5, randn(130, seed=1)
    linear = make_ops(quantization).pack_linear(weight.to(DEVICE), bias.to(DEVICE), **options)
    assert form_of(linear) == FORMS[name]
    # What was rounded is no place to look tokens up in.
    assert not isinstance(linear, KeepsRows)
    twin = ReferenceOps(quantization).pack_linear(weight, bias, **options)
    stock = TorchOps(CPU, quantization=quantization).pack_linear(weight, bias, **options)
    rows, residual = randn(70, width + 3, seed=2), randn(70, 130, seed=3)
    x, given, added = rows[:, :width], rows.to(DEVICE)[:, :width], residual.to(DEVICE)
    expected, others = twin(x, residual), stock(x, residual)
    for num_rows in (1, 3, 17, 70):
        found = linear(given[:num_rows], added[:num_rows]).cpu()
        assert_same_numbers(found, expected[:num_rows])
        torch.testing.assert_close(found, others[:num_rows], rtol=1e-4, atol=1e-5)
    assert_same_numbers(linear(given[:3]).cpu(), twin(x[:3]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_large_value_rounds_its_own_group_only(name: WeightFormat) -> None:
    weight = randn(30, 256) / 16.0
    quantization, options = options_of(name)
    linear = make_ops(quantization).pack_linear(weight.to(DEVICE), **options)
    assert_groups_apart(linear, FORMS[name].group)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_gets_the_same_bits_in_every_batch(name: WeightFormat) -> None:
    quantization, options = options_of(name)
    ops = make_ops(quantization)
    ops.device.num_processors = 1
    assert_same_bits(ops.pack_linear((randn(150, 736) / 16.0).to(DEVICE), **options), 736)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_types_and_gates(name: WeightFormat, dtype: torch.dtype) -> None:
    quantization, options = options_of(name)
    weight, bias = (randn(140, 160) / 8).to(dtype), randn(140, seed=1).to(dtype)
    x, residual = randn(17, 160, seed=2).to(dtype), randn(17, 140, seed=3).to(dtype)
    ops, twins = make_ops(quantization), ReferenceOps(quantization)
    given = weight.to(DEVICE), bias.to(DEVICE)
    found = ops.pack_linear(*given, **options)(x.to(DEVICE), residual.to(DEVICE))
    assert found.dtype == dtype
    assert_same_numbers(found.cpu(), twins.pack_linear(weight, bias, **options)(x, residual))
    gated = ops.pack_linear(*given, gate="silu", **options)
    assert isinstance(gated, GatedLinear)
    assert form_of(gated.linear) == FORMS[name]
    expected = twins.pack_linear(weight, bias, gate="silu", **options)(x)
    torch.testing.assert_close(gated(x.to(DEVICE)).cpu(), expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_twin(name: WeightFormat) -> None:
    """Also those of rows that are rounded in another chunk, and of a weight that lies in columns."""
    quantization, options = options_of(name)
    weight, ids = randn(32800, 66).T, torch.tensor([0, 63, 64, 65])
    linear: Any = make_ops(quantization).pack_linear(weight.to(DEVICE), **options)
    twin = ReferenceOps(quantization).pack_linear(weight[ids], **options)
    assert isinstance(twin, ReferenceQuantisedLinear)
    (part,) = linear.parts
    assert torch.equal(part.rows(ids.to(DEVICE)).cpu(), twin.dequantised())


@pytest.mark.parametrize("width", [128, 36])
def test_what_is_rounded(width: int) -> None:
    def bits(name: Quantization, min_bits: int) -> int:
        return form_of(make_ops(name).pack_linear(randn(2, width), min_bits=min_bits)).bits

    assert [bits("int8", min_bits) for min_bits in (4, 6, 8)] == [8, 8, 8]
    assert [bits("int4", min_bits) for min_bits in (4, 6, 8)] == [4, 6, 8]


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_extremes_and_what_is_not_finite(name: WeightFormat) -> None:
    weight, x = extremes(64)
    weight[7, 50] = math.inf
    quantization, options = options_of(name)
    linear = make_ops(quantization).pack_linear(weight.to(DEVICE), **options)
    found = linear(x.to(DEVICE)).cpu()
    assert found[:, 7].isnan().all()
    assert_extremes(found, ReferenceOps(quantization).pack_linear(weight, **options)(x))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["plain", "scaled-input", "shared-gate", "biases", "transposed"])
def test_experts(name: str, quantization: Quantization) -> None:
    """Experts run as one; the inputs of the second layer are no multiple of 32, its groups are smaller in int8."""
    ops, options = make_ops(quantization), ALL_OPTIONS[name]
    block, twin = (make_block(each, options, torch.float32) for each in (ops, ReferenceOps(quantization)))
    block.fuse(ops)
    assert isinstance(block.fused, TritonExperts)
    layers = block.fused._gate_ups, block.fused._downs
    assert all(isinstance(layer, StoredExpertLayer) for layer in layers)
    forms = [layer._parts[0].first.form for layer in layers]  # type: ignore[attr-defined]
    assert forms == [FORMS[quantization], FORMS["int8 of 16" if quantization == "int8" else "int4"]]
    x, start = (randn(40, WIDTH, seed=seed) for seed in (99, 98))
    for num_rows in (1, 40):
        found = block.mix(x[:num_rows].to(DEVICE), start[:num_rows].to(DEVICE)).cpu()
        expected = twin.mix(x[:num_rows], start[:num_rows])
        # What rounds to another whole number between the layers is worth some thousandths.
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max()))


def least_gap(output: RequestOutput) -> float:
    """Return the least difference of log probability between a chosen token and the next best."""
    gaps = []
    for step in output.outputs[0].logprobs or ():
        best, other = sorted((each.logprob for each in step.values()), reverse=True)[:2]
        gaps.append(best - other)
    return min(gaps)


def logprobs(outputs: Sequence[RequestOutput]) -> Tensor:
    """Return the log probabilities of the chosen tokens."""
    found = []
    for output in outputs:
        (sample,) = output.outputs
        found += [step[token].logprob for token, step in zip(sample.token_ids, sample.logprobs or (), strict=True)]
    return torch.tensor(found)


def test_captured_steps_keep_logits_of_float32(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A model of bfloat16 whose head is rounded: tokens and log probabilities are those of steps that are launched."""
    folder = str(save_checkpoint("llama3", tmp_path_factory.mktemp("llama3")))
    sampled = replace(GREEDY, logprobs=2, temperature=1.0, seed=1)
    prompts = [[10, 11, 12], [13, 14, 15, 16]]
    options: dict[str, Any] = {"quantization": "int8", "dtype": "bfloat16"}
    eager, captured = load(folder, **options), load(folder, **options, cudagraph_capture_sizes=(1, 2))
    expected, found = (llm.generate(prompts, sampled, use_tqdm=False) for llm in (eager, captured))
    assert captured.engine.executor._runner.captured.num_replayed > 0  # type: ignore[attr-defined]
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    assert torch.equal(logprobs(found), logprobs(expected))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama3", "gpt-oss"])
def test_greedy_tokens(name: str, quantization: Quantization, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Launched as they come, and captured: the tokens are those of stock operators on weights rounded alike.

    Prompts are those of many whose tokens are no near ties: a value of a row that lies between two whole numbers may
    become either.
    """
    folder = str(save_checkpoint(name, tmp_path_factory.mktemp(name)))
    greedy = replace(GREEDY, logprobs=2)
    rng = random.Random(1)
    prompts = [[rng.randrange(10, VOCAB_SIZE) for _ in range(3 + idx)] for idx in range(30)]
    by_gap = sorted(
        load(folder, kernels="torch", quantization=quantization).generate(prompts, greedy, use_tqdm=False),
        key=least_gap,
        reverse=True,
    )
    expected = by_gap[:3]
    chosen = [list(output.prompt_token_ids or ()) for output in expected]
    every: tuple[dict[str, Any], ...] = ({}, {"cudagraph_capture_sizes": (1, 4)})
    for options in every:
        llm = load(folder, quantization=quantization, **options)
        found = llm.generate(chosen, greedy, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
        # Of most tokens all whole numbers are the same. Rounding moves half of them by 0.05 or more.
        assert (logprobs(found) - logprobs(expected)).abs().median() < 1e-3
        if options:
            assert llm.engine.executor._runner.captured.num_replayed > 0  # type: ignore[attr-defined]
