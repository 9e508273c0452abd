"""Images of models in GGUF files, whose encoder has a file of its own: the tokens of transformers, from pixels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.engine.startup import vision
from quire.errors import CheckpointError, ConfigError, UnsupportedFeature
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.vision import load_vision_encoder
from quire.models.modules.vision_encoder import VisionEncoder
from tests.conformance.test_images import Pictures, case, pictures
from tests.conformance.test_media import Case, run
from tests.models.gguf.writer import f32, write_gguf, write_mmproj

# Fixtures of another module, by their names.
__all__ = ["case", "pictures"]


@pytest.fixture(scope="module")
def files(case: Case, pictures: Pictures) -> Path:
    """Return a folder with the model of a case and its encoder."""
    assert pictures, "they come with the settings of the image processor"
    folder = case.folder / "gguf"
    folder.mkdir()
    write_mmproj(case.folder, folder / "mmproj-F32.gguf", f32)
    write_gguf(case.folder, folder / "model.gguf", f32)
    return folder


def load_file(path: Path, **options: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "max_model_len": 96, "block_size": 8}
    return LLM(str(path), num_kv_blocks=200, **defaults, **options)


def encoder_of(files: Checkpoint) -> VisionEncoder:
    return load_vision_encoder(
        files, device="cpu", dtype=torch.float32, kernels="reference", quantization=None, weight_packing="plain"
    )


@pytest.mark.parametrize("named", [False, True])
def test_pictures_have_the_tokens_of_transformers(
    files: Path, pictures: Pictures, named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path, encoder = files / "model.gguf", files / "mmproj-F32.gguf"
    options: dict[str, Any] = {}
    if named:
        path, options = (tmp_path / "model.gguf"), {"mmproj": encoder}
        path.symlink_to(files / "model.gguf")
    llm = load_file(path, **options)
    assert f"Images are encoded by {encoder}" in caplog.text
    for prompt, expected in pictures:
        assert run(llm, [prompt])[0].outputs[0].token_ids == expected
    llm.close()


def test_embeddings_have_the_tokens_of_transformers(case: Case, files: Path) -> None:
    llm = load_file(files / "model.gguf")
    assert [output.outputs[0].token_ids for output in run(llm, case.prompts)] == case.outputs
    llm.close()


def test_a_wrong_encoder_that_is_named_fails_and_one_that_is_found_is_left_out(
    case: Case, files: Path, pictures: Pictures, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.gguf").symlink_to(files / "model.gguf")
    whole = (files / "mmproj-F32.gguf").read_bytes()
    (tmp_path / "mmproj.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"mmproj\.gguf"):
        load_file(tmp_path / "model.gguf", mmproj=str(tmp_path / "mmproj.gguf"))
    with pytest.raises(CheckpointError, match=r"none\.gguf does not exist"):
        load_file(tmp_path / "model.gguf", mmproj=str(tmp_path / "none.gguf"))
    with caplog.at_level(logging.WARNING):
        llm = load_file(tmp_path / "model.gguf")
    assert "Images are refused: " in caplog.text
    assert "mmproj.gguf" in caplog.text
    assert run(llm, case.prompts[:1])[0].outputs[0].token_ids == case.outputs[0]
    with pytest.raises(UnsupportedFeature, match="multi_modal_data is not supported"):
        llm.generate([pictures[0][0]], use_tqdm=False)
    llm.close()


def test_the_option_is_for_files_with_pillow(case: Case, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(files / "mmproj-F32.gguf")
    with pytest.raises(ConfigError, match=r"mmproj is .*, but it is for models of GGUF files"):
        load_file(case.folder, mmproj=path)
    with pytest.raises(ConfigError, match=r"mmproj must be None with model_impl='transformers'"):
        load_file(files / "model.gguf", mmproj=path, model_impl="transformers")
    monkeypatch.setattr(vision, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"mmproj .* needs Pillow: pip install"):
        load_file(files / "model.gguf", mmproj=path)
