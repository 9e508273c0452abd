"""An adapter that is merged into the weights: the same bits as a checkpoint with the sum, its name, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.config import EngineConfig
from quire.errors import CheckpointError, ConfigError, UnsupportedFeature
from quire.ops.interface.adapted_linear import AdaptedLinear
from tests.conformance.checkpoints import save_checkpoint
from tests.models.adapters.folders import PREFIX, random_matrices, write_adapter

SCALE = 2.0  # of `write_adapter`
PROMPT = [idx * 7 % 190 + 5 for idx in range(40)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
# Layers that are stored in one tensor and in several, heads in another order with gates, and a short convolution.
FAMILIES = ("llama3", "qwen3.5", "lfm2")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


class World:
    """A model, an adapter of it, and a checkpoint with their sum.

    Args:
        folder: folder for all of them.
        family: family of the model.
    """

    def __init__(self, folder: Path, family: str) -> None:
        self.model = save_checkpoint(family, folder / "model")
        tensors = load_file(self.model / "model.safetensors")
        names = {name for name in tensors if name.endswith(tuple(f"{each}.weight" for each in MODULES))}
        widths = {name.removesuffix(".weight"): tuple(tensors[name].shape) for name in sorted(names)}
        matrices = random_matrices(widths, 4, 1)  # type: ignore[arg-type]
        self.adapter = write_adapter(folder / "adapter", matrices)
        self.merged = folder / "merged"
        self.tensors, self.matrices, self.names = tensors, matrices, names

    def merge(self, dtype: torch.dtype) -> str:
        """Write the checkpoint with the sum, rounded once to a dtype, and return its folder."""
        shutil.copytree(self.model, self.merged, dirs_exist_ok=True)
        merged = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        for name in self.names:
            a, b = (self.matrices[f"{PREFIX}{name.removesuffix('weight')}lora_{each}.weight"] for each in "AB")
            merged[name] = (self.tensors[name].float() + SCALE * (b @ a)).to(dtype)
        save_file(merged, self.merged / "model.safetensors")
        return str(self.merged)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    return {family: World(tmp_path_factory.mktemp("merged"), family) for family in FAMILIES}


def load(model: object, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "block_size": 8, "max_model_len": 128}
    return LLM(str(model), **defaults | {"num_kv_blocks": 200} | options)


def load_merged(world: World, name: str = "sql", **options: Any) -> LLM:
    return load(world.model, merge_lora=True, lora_modules={name: world.adapter}, **options)


def outputs(llm: LLM) -> list[str]:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    return [*map(repr, output.outputs[0].logprobs or ())]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        ("float32", None),
        ("bfloat16", None),
        ("bfloat16", "int8"),
        pytest.param("bfloat16", "int4", marks=pytest.mark.slow),
    ],
)
def test_a_merged_adapter_gives_the_bits_of_a_merged_checkpoint(
    worlds: dict[str, World], family: str, dtype: str, quantization: str | None
) -> None:
    world = worlds[family]
    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    with load_merged(world, **options) as llm, load(world.merge(getattr(torch, dtype)), **options) as expected:
        assert outputs(llm) == outputs(expected)
        found = outputs(expected)
    with load(world.model, **options) as plain:
        assert outputs(plain) != found


def test_a_step_is_that_of_a_model_without_adapters(worlds: dict[str, World]) -> None:
    with load_merged(worlds["llama3"]) as llm:
        assert llm.model_name == "sql"
        assert llm.engine.adapters is None
        runner: Any = llm.engine.executor
        decoder = runner._runner._decoder
        assert decoder._fused_adapted is None
        for slot in decoder.weights.slots.values():
            assert not any(isinstance(each.projection.run, AdaptedLinear) for each in slot.adapted)
        outputs(llm)
        assert decoder.step_adapters.all is None
        with pytest.raises(UnsupportedFeature, match="serves no adapters beside the model"):
            llm.generate([PROMPT], PARAMS, lora_request=LoRARequest("sql"), use_tqdm=False)


def test_the_identity_of_blocks_has_the_content(worlds: dict[str, World], tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    world = worlds["llama3"]
    other = write_adapter(tmp_path / "other", {name: tensor * 2 for name, tensor in world.matrices.items()})
    hits = []
    for adapter in (world.adapter, other, world.adapter):
        options: dict[str, Any] = {"prefix_cache_dir": str(tmp_path / "cache"), "dtype": "float32", "num_kv_blocks": 60}
        with load(world.model, merge_lora=True, lora_modules={"sql": adapter}, **options) as llm:
            (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
            hits.append(output.num_cached_tokens)
    assert hits[:2] == [0, 0]
    assert hits[2] is not None
    assert hits[2] > 0


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"merge_lora": 1}, "merge_lora", "merge_lora must be"),
        ({"merge_lora": True}, "merge_lora", "exactly one adapter in lora_modules, got 0"),
        ({"merge_lora": True, "lora_modules": ["a=b", "c=d"]}, "merge_lora", "exactly one .* got 2"),
        ({"merge_lora": True, "lora_modules": ["a=b"], "enable_lora": True}, "merge_lora", "leave enable_lora out"),
        ({"merge_lora": True, "lora_modules": ["a=b"], "served_model_name": "x"}, "served_model_name", "leave it out"),
        ({"lora_modules": ["a=b"]}, "lora_modules", "enable_lora, or merge_lora"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig.from_options(**options)
    assert caught.value.field == field


def test_the_name_of_the_adapter_is_the_served_one() -> None:
    for served in (None, "a", ["a"]):
        config = EngineConfig.from_options(merge_lora=True, lora_modules=["a=b"], served_model_name=served)
        assert config.model.served_names == ("a",)


def test_adapters_that_are_refused(worlds: dict[str, World], tmp_path: Path) -> None:
    world = worlds["llama3"]
    large = write_adapter(tmp_path / "large", {name: tensor * 1e30 for name, tensor in world.matrices.items()})
    layer = f"{PREFIX}model.layers.0.self_attn.q_proj.lora"
    narrow = {f"{layer}_A.weight": torch.ones(4, 8), f"{layer}_B.weight": torch.ones(128, 4)}
    for folder, options, message in (
        (tmp_path / "none", {}, "is no folder"),
        (world.adapter, {"max_lora_rank": 2}, "max_lora_rank, which is 2"),
        (large, {}, "cannot represent"),
        (write_adapter(tmp_path / "narrow", narrow), {}, "must be of shape"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(world.model, merge_lora=True, lora_modules={"sql": folder}, **options)
