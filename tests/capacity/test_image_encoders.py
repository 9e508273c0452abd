"""The encoder of images in a plan: the bytes of its matrices, where the engine would load it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from quire.config import EngineConfig
from quire.models.capacity.planner import plan_memory
from quire.models.capacity.report import MemoryPlan, PlanRequest
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
    assert plan(folder, device="cuda", tensor_parallel_size=2).encoder_bytes is None, "ranks refuse images"
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
