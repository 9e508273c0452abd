"""Quantised weights over transformers' modules: the values that a checkpoint stores, and what a family computes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from quire import LLM, SamplingParams
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.tensor_reader import TensorReader
from quire.models.hosted.linear import is_transposed
from quire.models.hosted.readings import values_of
from quire.sequences.lora import LoRARequest
from tests.hosted.filled import filled, save, state_of
from tests.models.adapters.folders import linear_widths, random_matrices, write_adapter
from tests.models.adapters.test_quantised_bases import STORED, stored
from tests.models.test_gpt_oss import Written
from tests.models.tiny import make_tiny

PROMPTS = [[3, 5, 7, 90, 11, 6, 8, 41, 2], [8] * 3 + list(range(20, 60)), [17, 18]]
MEASURED = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "kernels": "torch",
    "num_threads": 1,
    "num_kv_blocks": 60,
    "max_model_len": 96,
}
# Log probabilities are equal to within the first, and all to within the second after an activation that is rounded to
# int8 fell the other way in one sequence.
EQUAL, NEAR = 1e-4, 0.1
# Layers with [in, out] weights, latent attention, experts one by one.
HOSTED = {"gpt2": r"\.(c_attn|c_fc|c_proj)\.weight$", "deepseek_v3": r"_proj(_with_mqa)?\.weight$"}
FILE = "model.safetensors"


def log_probabilities(folder: Path, adapter: Path | None = None, **options: Any) -> Tensor:
    """Return those of the prompts' tokens, the first and the last prompt's with the adapter."""
    asked = None if adapter is None else LoRARequest("a", 1, str(adapter))
    with LLM(str(folder), **OPTIONS, enable_lora=adapter is not None, **options) as llm:
        prompts: list[Any] = PROMPTS
        outputs = llm.generate(prompts, MEASURED, lora_request=[asked, None, asked], use_tqdm=False)
    known: list[Any] = [output.prompt_logprobs or [] for output in outputs]
    return torch.tensor(
        [
            step[token].logprob
            for steps, ids in zip(known, PROMPTS, strict=True)
            for step, token in zip(steps, ids, strict=True)
            if step
        ]
    )


def assert_same(one: Tensor, other: Tensor) -> None:
    difference = (one - other).abs()
    assert difference.median() < EQUAL
    assert difference.max() < NEAR


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=() if method == "gptq" else pytest.mark.slow) for method in STORED]
)
def test_stored_formats_and_their_adapters_are_those_of_a_family(method: str, tmp_path: Path) -> None:
    folder = stored(method)(tmp_path)
    widths = linear_widths(make_tiny("qwen3").reference)
    adapter = write_adapter(tmp_path / "adapter", random_matrices(widths))
    hosted, native = (log_probabilities(folder, adapter, model_impl=impl) for impl in ("transformers", "native"))
    assert_same(hosted, native)
    assert (log_probabilities(folder, model_impl="transformers") - hosted).abs().max() > 2 * NEAR


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounding_while_loading_is_that_of_a_family(quantization: str, tmp_path: Path) -> None:
    """Where no layer is narrow: narrow ones keep eight bits over modules, whose routers have no names."""
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2}
    heads: dict[str, Any] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "initializer_range": 0.05,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(tmp_path)
    hosted, native = (
        log_probabilities(tmp_path, model_impl=impl, quantization=quantization) for impl in ("transformers", "native")
    )
    assert_same(hosted, native)
    assert (log_probabilities(tmp_path, model_impl="transformers") - hosted).abs().median() > 100 * EQUAL


def store(folder: Path, method: str, layers: str, module: nn.Module) -> tuple[Path, Path]:
    """Write a checkpoint with some layers stored by a method, and one with the values that these stand for."""
    convert, config = STORED[method]
    transposed = {f"{name}.weight" for name, layer in module.named_modules() if is_transposed(layer)}
    tensors: dict[str, Tensor] = {}
    names = []
    for name, weight in load_file(folder / FILE).items():
        matrix = weight.mT if name in transposed else weight
        if re.search(layers, name) is None or matrix.shape[0] % 16 or matrix.shape[1] % 32:
            tensors[name] = weight
            continue
        names.append(name)
        parts: Mapping[str, Tensor] = convert(matrix.contiguous())[0]
        tensors |= {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    assert len(names) > 4
    fields = json.loads((folder / "config.json").read_text())
    codes = write(folder / "codes", tensors, fields | {"quantization_config": config})
    reader = TensorReader(Checkpoint.open(str(codes)))
    values = {name: values_of(reader.read(name)) for name in names}
    values = {name: value.mT if name in transposed else value for name, value in values.items()}
    plain = {name: tensor for name, tensor in load_file(folder / FILE).items() if name not in values}
    return codes, write(folder / "values", plain | values, fields)


def write(folder: Path, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / FILE)
    return folder


def assert_same_state(one: Path, other: Path) -> None:
    """Compare the tensors of two filled modules, to within the rounding of a product of a code and scales."""
    found, wanted = (state_of(filled(folder)) for folder in (one, other))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("method", STORED)
@pytest.mark.parametrize("model_type", HOSTED)
def test_modules_get_the_values_that_codes_stand_for(model_type: str, method: str, tmp_path: Path) -> None:
    module = save(model_type, tmp_path)
    assert_same_state(*store(tmp_path, method, HOSTED[model_type], module))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("gpt-oss"))


def test_experts_in_blocks_have_the_values_of_the_plain_ones(gpt_oss: Written) -> None:
    """The blocks are rows of [X, out, in], and the module's experts [X, in, out]."""
    found, wanted = (state_of(filled(folder)) for folder in (gpt_oss.in_blocks, gpt_oss.plain))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_experts_in_blocks_compute_what_the_family_computes(gpt_oss: Written) -> None:
    hosted, native = (log_probabilities(gpt_oss.in_blocks, model_impl=impl) for impl in ("transformers", "native"))
    assert_same(hosted, native)
