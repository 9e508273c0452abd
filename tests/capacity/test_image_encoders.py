"""The encoder of images in a plan: the bytes of its matrices, where the engine would load it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM
from quire.config import CacheConfig, EngineConfig, Machine, StepCost, pool_blocks
from quire.engine.startup import loading
from quire.engine.startup.image_memory import find_images, with_images
from quire.models.capacity.planner import plan_memory
from quire.models.capacity.report import MemoryPlan, PlanRequest
from quire.models.capacity.step_memory import image_bytes
from quire.models.checkpoints.checkpoint import read_config
from quire.models.families.hf_config import HFConfig
from quire.models.families.vision_towers import gemma3_vision, qwen_vision
from quire.models.modules.vision_encoder import VisionEncoder
from quire.models.specs import vision_spec
from quire.ops import make_ops
from tests.capacity.live_bytes import LiveBytes
from tests.images.tiny_model import save, save_gemma
from tests.models.gguf.writer import f32, write_gguf, write_mmproj

MEMORY = 1 << 30


def plan(folder: Path, **options: Any) -> MemoryPlan:
    config = EngineConfig.from_options(model=str(folder), **{"dtype": "float32", **options})
    return plan_memory(PlanRequest(config=config, memory_bytes=MEMORY))


@pytest.mark.parametrize("write", [save, save_gemma])
def test_the_matrices_of_an_encoder_are_counted(write: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = write(tmp_path)
    parts = ("model.visual.", "vision_tower.", "multi_modal_projector.")
    tensors = load_file(folder / "model.safetensors")
    matrices = [one for name, one in tensors.items() if name.startswith(parts) and one.ndim > 1]
    found = plan(folder)
    assert found.encoder_bytes == sum(one.nbytes for one in matrices)
    without = plan(folder, language_model_only=True)
    assert without.encoder_bytes is None
    assert found.weights_bytes == (without.weights_bytes or 0) + (found.encoder_bytes or 0)
    assert (plan(folder, quantization="int8").encoder_bytes or 0) < (found.encoder_bytes or 0) / 2
    assert plan(folder, limit_mm_per_prompt={"image": 0}).encoder_bytes is None


def test_an_encoder_that_would_not_be_loaded_is_not_counted(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert plan(folder, device="cuda").encoder_bytes is not None
    assert plan(folder, device="cuda", tensor_parallel_size=2).encoder_bytes is not None, "the first rank has it"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": {}}))
    assert plan(folder).encoder_bytes is None


def test_the_file_beside_a_gguf_file_is_counted(tmp_path: Path) -> None:
    source = save(tmp_path / "source")
    folder = tmp_path / "files"
    folder.mkdir()
    write_gguf(source, folder / "model.gguf", f32)
    assert plan(folder / "model.gguf").encoder_bytes is None
    write_mmproj(source, folder / "mmproj-F32.gguf", f32)
    found = plan(folder / "model.gguf")
    plain = load_file(source / "model.safetensors")
    stored = sum(one.nbytes for name, one in plain.items() if name.startswith("model.visual."))
    assert found.encoder_bytes == stored
    assert plan(folder / "model.gguf", mmproj=str(folder / "mmproj-F32.gguf")).encoder_bytes == stored


QWEN: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_heads": 4,
    "out_hidden_size": 512,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [0],
}
GEMMA: dict[str, Any] = {
    "hidden_size": 288,
    "image_size": 448,
    "intermediate_size": 1076,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vision_use_head": False,
}
DEEP = {"depth": 4, "deepstack_visual_indexes": [0, 1, 2], "out_hidden_size": 4096, "intermediate_size": 256}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("read", "vision"),
    [
        (qwen_vision, QWEN),
        (qwen_vision, QWEN | DEEP),
        (qwen_vision, QWEN | {"hidden_size": 512, "patch_size": 4}),
        (gemma3_vision, GEMMA),
    ],
)
@pytest.mark.parametrize("piece_rows", [1024, 128])
def test_the_memory_of_an_image_is_that_of_its_live_tensors(
    read: Any, vision: Any, dtype: torch.dtype, piece_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_spec, "PIECE_ROWS", piece_rows)
    monkeypatch.setattr(vision_spec, "PIECE_SCORES", 1 << 20)
    whole = {"vision_config": vision, "text_config": {"hidden_size": 640}, "mm_tokens_per_image": 64}
    spec, _ = read(HFConfig(whole))
    device = torch.device("cpu")
    encoder = VisionEncoder(spec, ops=make_ops(device, "torch"), dtype=dtype, device=device)
    for name, shape in encoder.weights.shapes().items():
        encoder.weights.load(name, torch.full(shape, 0.01, dtype=dtype))
    num_patches = 32 * 32
    with torch.inference_mode(), LiveBytes() as live:
        encoder(torch.ones(num_patches, math.prod(spec.patch_shape)), 32, 32)
    assert live.peak <= image_bytes(spec, num_patches, dtype.itemsize) < 1.08 * live.peak


@pytest.mark.parametrize("write", [save, save_gemma])
def test_a_plan_sets_aside_what_an_engine_does(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write(tmp_path))
    costs: list[StepCost] = []

    def watched(*facts: Any) -> StepCost:
        costs.append(with_images(*facts))
        return costs[-1]

    monkeypatch.setattr(loading, "with_images", watched)
    for changes in ({}, {"mm_processor_kwargs": {"max_pixels": 1024}} if write is save else {}):
        options: dict[str, Any] = {"dtype": "float32", **changes}
        config = EngineConfig.from_options(model=folder, **options)
        request = PlanRequest(config=config, memory_bytes=MEMORY, find_images=find_images)
        planned = plan_memory(request).image_bytes
        LLM(folder, **options, kv_cache_memory_bytes=1 << 22, max_model_len=96, skip_tokenizer_init=True).close()
        assert planned == costs[-1].image_bytes > 128 << 20
    for nothing in ({"language_model_only": True}, {"model_impl": "transformers"}):
        config = EngineConfig.from_options(model=folder, dtype="float32", **nothing)
        assert find_images(config, read_config(folder)) is None


def test_a_pool_leaves_memory_for_images() -> None:
    of_images, size = 3 << 20, 1 << 10
    cost, machine = StepCost(image_bytes=of_images), Machine(device="cpu", available_bytes=4 << 20, num_threads=1)

    def blocks(cost: StepCost, machine: Machine = machine, **cache: Any) -> int:
        return pool_blocks(CacheConfig(**cache), machine, size, 1 << 20, 4, step=cost)[0]

    assert blocks(StepCost()) == (2 << 20) // size - 1
    assert blocks(cost) == (1 << 20) // size - 1
    assert blocks(cost, kv_cache_memory_bytes=1 << 20) == (1 << 20) // size - 1
    # The half that pools leave by default has room for them.
    assert blocks(StepCost(image_bytes=2 << 20)) == blocks(StepCost())
    gpu = Machine(device="cuda", available_bytes=4 << 20, num_threads=1, total_bytes=4 << 20)
    assert blocks(StepCost(), gpu) - blocks(cost, gpu) == of_images // size
