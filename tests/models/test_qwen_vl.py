"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, from checkpoints with vision encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from tests.models.test_conformance import assert_same
from tests.models.tiny import SHAPE, PagedRun, random_tokens, reference_logits

TEXT: dict[str, Any] = SHAPE | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]},
    "pad_token_id": 0,
}
VISION = {"depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "spatial_merge_size": 2}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Tokens that stand for no image.
IDS = dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), 210)


class Case(NamedTuple):
    config_class: type
    model_class: type
    text: dict[str, Any] = {}  # noqa: RUF012
    vision: dict[str, Any] = {"hidden_size": 32}  # noqa: RUF012
    tied: bool = False


CASES = {
    "qwen2-vl": Case(Qwen2VLConfig, Qwen2VLForConditionalGeneration, vision={"embed_dim": 32, "hidden_size": 64}),
    "qwen2.5-vl": Case(Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, tied=True),
    "qwen3-vl": Case(Qwen3VLConfig, Qwen3VLForConditionalGeneration, tied=True),
    "qwen3-vl-moe": Case(Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, EXPERTS),
}


@pytest.mark.parametrize("name", CASES)
def test_the_language_model_of_a_checkpoint_with_images(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers saves it, under the names of the released checkpoints; the rest of its tensors is left out."""
    case = CASES[name]
    vision = VISION | case.vision | ({} if name.startswith("qwen2") else {"num_position_embeddings": 16})
    config = case.config_class(text_config=TEXT | case.text, vision_config=vision, tie_word_embeddings=case.tied, **IDS)
    torch.manual_seed(3)
    reference = case.model_class(config).eval()
    reference.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(str(tmp_path))
    decoder = load_decoder(checkpoint, device="cpu", dtype=torch.float32)
    # Those of Qwen3-VL are its encoder's, which an engine loads too.
    assert ("visual" in caplog.text) == name.startswith("qwen2")
    token_ids = [token % 200 for token in random_tokens(40)]
    assert_same(PagedRun(decoder).step({0: token_ids})[0], reference_logits(reference, token_ids))
    if name.endswith("moe"):
        # The released checkpoints have columns of experts where transformers saves rows.
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        save_file({key: _in_columns(key, tensor) for key, tensor in tensors.items()}, path)
        released = load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32)
        assert torch.equal(PagedRun(released).step({0: token_ids})[0], PagedRun(decoder).step({0: token_ids})[0])
    if name.startswith("qwen2"):
        # Older checkpoints have the fields beside those of the vision encoder, with another name of the rotation.
        saved = json.loads((tmp_path / "config.json").read_text())
        text = saved.pop("text_config")
        rope = text.pop("rope_parameters")
        flat = {
            **text,
            **saved,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        }
        assert build(flat) == build(checkpoint.config)


def _in_columns(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous() if ".experts." in name else tensor
