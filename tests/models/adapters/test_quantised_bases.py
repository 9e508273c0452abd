"""Adapters of quantised weights equal the sum of what the codes stand for and their products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import ConfigError
from quire.measurement.bench.exact_ops import ExactOps
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.tensor_reader import TensorReader, join_parts
from quire.models.families import build
from quire.models.families.quantization_config import without_quantization
from quire.models.loading.loading import load_decoder, make_adapter_slots
from quire.models.loading.weights import load_weights
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.decoder import Decoder
from quire.models.specs.spec import WeightMap
from quire.ops.interface.lora import LoraRows
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.reference.reference_ops import ReferenceOps
from tests.engine.test_stored_quantization import METHODS, Tensors, groups_of
from tests.models.adapters.expert_folders import linear_adapter, products_of
from tests.models.adapters.folders import random_matrices, write_adapter
from tests.models.gguf.cases import save_checkpoint
from tests.models.gguf.test_models import mixed
from tests.models.gguf.writer import write_gguf
from tests.models.stored_quantization.packers import pack_awq
from tests.models.stored_quantization.test_float8_models import CONFIGS, SUFFIXES, is_quantised, quantise, save
from tests.models.stored_tensors import stored_tensors
from tests.models.tiny import PagedRun, fill, make_tiny, random_tokens
from tests.ops.backends import LIBRARIES

SCALE = 2.0  # of `write_adapter`
TOKENS = random_tokens(30, 1)
needs_kernels = pytest.mark.skipif("avx2" not in LIBRARIES, reason="fused layers need native kernels")


def awq(weight: Tensor) -> tuple[Tensors, None]:
    """Return the tensors of a layer, whose zero points are in the middle."""
    codes, scales = groups_of(weight, 32)
    zeros = np.full(tuple(scales.shape), 8)
    packed = {".qweight": pack_awq(codes.numpy()), ".qzeros": pack_awq(zeros)}
    return packed | {".scales": scales.half().t().contiguous()}, None


def float8(weight: Tensor) -> tuple[Tensors, None]:
    codes, scales = quantise(weight)
    return {".weight": codes, f".{SUFFIXES['fp8']}": scales}, None


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"}
STORED: dict[str, tuple[Any, dict[str, Any]]] = {**METHODS, "awq": (awq, AWQ), "fp8": (float8, CONFIGS["fp8"])}


def stored(method: str, family: str = "qwen3") -> Callable[[Path], Path]:
    """Return a function that writes a checkpoint whose projections are stored by a method."""

    def write(folder: Path) -> Path:
        tiny, (convert, config) = make_tiny(family), STORED[method]
        tensors: Tensors = {}
        for name, weight in stored_tensors(tiny.reference).items():
            if not is_quantised(name, weight):
                tensors[name] = weight
                continue
            tensors |= {name.removesuffix(".weight") + suffix: part for suffix, part in convert(weight)[0].items()}
        return save(folder / "model", tiny.config | {"dtype": "float32", "quantization_config": config}, tensors)

    return write


def gguf_file(case: str, type_of: Callable[[str, tuple[int, ...]], Type]) -> Callable[[Path], Path]:
    """Return a function that writes a GGUF file of tensors of some types."""

    def write(folder: Path) -> Path:
        (folder / "source").mkdir()
        save_checkpoint(case, folder / "source")
        return write_gguf(folder / "source", folder / "model.gguf", type_of)

    return write


def eight_bits(_name: str, shape: tuple[int, ...]) -> Type:
    return Type.F16 if shape[-1] % 32 else Type.Q8_0


BASES: dict[str, Callable[[Path], Path]] = {
    **{method: stored(method) for method in STORED},
    # Heads with gates and in another order, states, a short convolution, experts beside a shared one.
    "fp8-qwen3.5": stored("fp8", "qwen3.5"),
    "gguf-llama": gguf_file("llama", eight_bits),
    **{f"gguf-mixed-{case}": gguf_file(case, mixed) for case in ("llama", "phi3", "qwen3.5", "lfm2", "qwen3.5-moe")},
}
SLOW = ("w8a8", "gguf-mixed-llama", "gguf-mixed-lfm2", "gguf-mixed-phi3")
EVERY_BASE = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BASES]


class Base(NamedTuple):
    """A quantised checkpoint and an adapter of all layers that take one.

    Args:
        values: what the stored tensors stand for, by the family's names.
        sums: the same with the products of the adapter.
    """

    path: Path
    adapter: Path
    values: Tensors
    sums: Tensors


def make_base(name: str, folder: Path) -> Base:
    path = BASES[name](folder)
    checkpoint = Checkpoint.open(str(path))
    spec, weight_map = build(without_quantization(checkpoint.config))
    values = values_of(checkpoint, weight_map)
    slots = Decoder(spec, ops=ReferenceOps(), dtype=torch.float32, device=torch.device("cpu")).weights.slots
    sources = {each for slot, names in weight_map.items() if slots[slot].adapted for each in names}
    adapted = sorted(sources - {"lm_head.weight"})
    matrices = random_matrices({each.removesuffix(".weight"): values[each].shape for each in adapted}, 4, 1)  # type: ignore[misc]
    return Base(path, write_adapter(folder / "adapter", matrices), values, sums_of(values, matrices))


def sums_of(values: Tensors, matrices: Tensors) -> Tensors:
    """Return the values of a model with the products of an adapter, also where experts are stored together."""
    sums = {name: tensor.clone() for name, tensor in values.items()}
    for module, delta in products_of(matrices, SCALE):
        if f"{module}.weight" in sums:
            sums[f"{module}.weight"] += delta
            continue
        base, number, part = module.rsplit(".", 2)
        stacked = sums[f"{base}.down_proj" if part == "down_proj" else f"{base}.gate_up_proj"]
        rows = stacked.view(-1, *delta.shape)  # of each expert, a gate and an up, or a down
        rows[int(number) if part == "down_proj" else 2 * int(number) + (part == "up_proj")] += delta
    return sums


def values_of(checkpoint: Checkpoint, weight_map: WeightMap) -> Tensors:
    """Return the values of all tensors in float32, as the engine reads them."""
    reader, values = TensorReader(checkpoint), {}
    for source in {each for names in weight_map.values() for each in names}:
        parts = [reader.read(part) for part in checkpoint.sources_of([source])]
        if all(isinstance(part, Tensor) for part in parts):
            values[source] = torch.cat([part.float() for part in parts if isinstance(part, Tensor)])
        else:
            rows = sum((part if isinstance(part, Tensor) else part.weight).shape[0] for part in parts)
            width = (parts[0] if isinstance(parts[0], Tensor) else parts[0].weight).shape[1]
            joined = join_parts(parts, (rows, width), torch.float32)
            values[source] = joined.dequantize() if isinstance(joined, StoredWeight) else joined
    return values


class WithAdapter:
    """A decoder all of whose rows go through an adapter."""

    def __init__(self, checkpoint: Checkpoint, decoder: CausalModel, adapter: Path) -> None:
        slots = make_adapter_slots(checkpoint, decoder, 16)
        slots.put(0, slots.read(adapter))
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def __call__(self, input_ids: Tensor, *arguments: Any, **options: Any) -> Tensor:
        rows = LoraRows(len(input_ids), {0: [*range(len(input_ids))]})
        found: Tensor = self._decoder(input_ids, *arguments, **options | {"adapters": (rows, rows)})
        return found


def logits(decoder: Any) -> Tensor:
    return PagedRun(decoder).step({0: TOKENS})[0]


def logits_of_values(checkpoint: Checkpoint, values: Tensors) -> Tensor:
    spec, weight_map = build(without_quantization(checkpoint.config))
    decoder = Decoder(spec, ops=ReferenceOps(), dtype=torch.float32, device=torch.device("cpu"))
    fill(decoder, weight_map, values)
    return logits(decoder)


def assert_exact(checkpoint: Checkpoint, adapter: Path, expected: Tensor) -> None:
    """Compare with the logits of a decoder whose products are exact."""
    spec, weight_map = build(without_quantization(checkpoint.config))
    exact = Decoder(spec, ops=ExactOps(), dtype=torch.float32, device=torch.device("cpu"))
    load_weights(checkpoint, weight_map, exact)
    found = logits(WithAdapter(checkpoint, exact, adapter))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", EVERY_BASE)
def test_logits_are_those_of_the_sums(name: str, tmp_path: Path) -> None:
    """Exactly where products are, and near where kernels round rows to int8 besides."""
    base = make_base(name, tmp_path)
    checkpoint = Checkpoint.open(str(base.path))
    expected = logits_of_values(checkpoint, base.sums)
    assert_exact(checkpoint, base.adapter, expected)
    without = logits_of_values(checkpoint, base.values)
    assert (expected - without).std() > 0.5 * expected.std()
    for kernels in ("auto", "torch"):
        decoder = load_decoder(checkpoint, device="cpu", dtype=torch.float32, kernels=kernels)
        near = logits(WithAdapter(checkpoint, decoder, base.adapter))
        assert (near - expected).std() < 0.2 * expected.std(), kernels


EXPERT_BASES: dict[str, Callable[[Path], Path]] = {
    **{f"{method}-qwen3-moe": stored(method, "qwen3-moe") for method in ("awq", "fp8")},
    **{f"gguf-mixed-{case}": gguf_file(case, mixed) for case in ("qwen3-moe", "qwen3.5-moe", "gpt-oss")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_BASES)
def test_stored_experts_take_adapters_of_each(name: str, tmp_path: Path) -> None:
    """Exactly where products are, and near where kernels round rows to int8 besides."""
    path = EXPERT_BASES[name](tmp_path)
    checkpoint, adapter = Checkpoint.open(str(path)), linear_adapter(path, tmp_path / "adapter", std=0.3)
    values = values_of(checkpoint, build(without_quantization(checkpoint.config))[1])
    expected = logits_of_values(checkpoint, sums_of(values, load_file(adapter / "adapter_model.safetensors")))
    assert_exact(checkpoint, adapter, expected)
    without = logits_of_values(checkpoint, values)
    assert (expected - without).std() > 0.3 * expected.std()
    for kernels in ("auto", "torch"):
        decoder = load_decoder(checkpoint, device="cpu", dtype=torch.float32, kernels=kernels)
        near = logits(WithAdapter(checkpoint, decoder, adapter))
        assert (near - expected).std() < 0.25 * (expected - without).std(), kernels


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.2), ("int4", 0.6)])
def test_weights_that_are_rounded_when_they_are_loaded(quantization: Any, limit: float, tmp_path: Path) -> None:
    folder, tiny = tmp_path / "model", make_tiny("qwen3")
    values = stored_tensors(tiny.reference)
    save(folder, tiny.config | {"dtype": "float32"}, values)
    names = [name for name in values if name.endswith("_proj.weight")]
    matrices = random_matrices({each.removesuffix(".weight"): values[each].shape for each in names}, 4, 1)  # type: ignore[misc]
    adapter = write_adapter(tmp_path / "adapter", matrices)
    checkpoint = Checkpoint.open(str(folder))
    decoders = [
        load_decoder(checkpoint, device="cpu", dtype=torch.float32, kernels=each, quantization=quantization)
        for each in ("auto", "torch")
    ]
    expected = logits_of_values(checkpoint, sums_of(values, matrices))
    native, other = (logits(WithAdapter(checkpoint, decoder, adapter)) for decoder in decoders)
    assert (native - expected).std() < limit * expected.std()
    assert (native - other).std() < 0.1 * expected.std()


@needs_kernels
@pytest.mark.parametrize(
    "name", ["w4a16", "fp8", "gguf-llama", pytest.param("gguf-mixed-phi3", marks=pytest.mark.slow)]
)
def test_fused_steps_give_the_bits_of_the_layers_one_by_one(name: str, tmp_path: Path) -> None:
    base = make_base(name, tmp_path)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    adapters = [LoRARequest("a"), None, LoRARequest("a")]
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 60, "max_model_len": 64, "num_threads": 1}
    options |= {"enable_lora": True, "lora_modules": {"a": base.adapter}, "enable_prefix_caching": False}
    with LLM(str(base.path), **options) as llm:
        runner: Any = llm.engine.executor
        decoder = runner._runner._decoder
        assert decoder._fused_adapted is not None
        bits = []
        for _ in range(2):
            outputs = llm.generate([TOKENS[:9], TOKENS[:9], TOKENS[:7]], params, lora_request=adapters, use_tqdm=False)
            bits.append([repr(output.outputs[0].logprobs) for output in outputs])
            decoder._fused_adapted = None
    assert bits[0] == bits[1]
    assert bits[0][0] != bits[0][1]


@pytest.mark.parametrize(("name", "how"), [("awq", "quantised by awq"), ("gguf-llama", "of a GGUF file")])
def test_weights_that_are_stored_quantised_take_no_merged_adapter(name: str, how: str, tmp_path: Path) -> None:
    base = make_base(name, tmp_path)
    with pytest.raises(ConfigError, match=f"merge_lora needs weights that are stored plain, .* are {how}") as caught:
        LLM(str(base.path), skip_tokenizer_init=True, merge_lora=True, lora_modules={"a": base.adapter})
    assert caught.value.field == "merge_lora"
