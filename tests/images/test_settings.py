"""Fields of image processors: what published files state, what a user changes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.inputs.images.settings import read_processing, read_settings
from quire.errors import ConfigError, InvalidParameter
from quire.models.families.hf_config import HFConfig
from quire.models.families.vision_towers import gemma3_vision, qwen_vision
from tests.images.test_encoder import GEMMA, QWEN
from tests.images.test_processing import GEMMA3, HALF, QWEN3

QWEN3_SPEC = qwen_vision(HFConfig({"vision_config": QWEN | {"patch_size": 16}}))[0]
GEMMA3_SPEC = gemma3_vision(
    HFConfig({"vision_config": GEMMA | {"patch_size": 14, "image_size": 896}, "text_config": {"hidden_size": 8}})
)[0]
# As in the published files.
QWEN3_FIELDS: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": list(HALF),
    "image_std": list(HALF),
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
GEMMA3_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("do_convert_rgb", "do_pan_and_scan", "pan_and_scan_max_num_crops")),
    **dict.fromkeys(("do_normalize", "do_rescale", "do_resize"), True),
    "image_mean": list(HALF),
    "image_std": list(HALF),
    "image_processor_type": "Gemma3ImageProcessor",
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}


def test_published_files_are_read() -> None:
    assert read_processing(QWEN3_FIELDS, QWEN3_SPEC) == replace(QWEN3, max_pixels=16_777_216)
    assert read_processing(GEMMA3_FIELDS, GEMMA3_SPEC) == GEMMA3
    older = {name: value for name, value in QWEN3_FIELDS.items() if name != "size"}
    older |= {"min_pixels": 65_536, "max_pixels": 1_048_576}
    assert read_processing(older, QWEN3_SPEC) == QWEN3


def test_the_fields_lie_in_one_of_two_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        read_settings(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": QWEN3_FIELDS}))
    assert read_settings(tmp_path) == QWEN3_FIELDS
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(GEMMA3_FIELDS))
    assert read_settings(tmp_path) == GEMMA3_FIELDS
    (tmp_path / "preprocessor_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        read_settings(tmp_path)


def test_a_user_changes_how_large_images_are() -> None:
    found = read_processing(QWEN3_FIELDS, QWEN3_SPEC, {"min_pixels": 2048, "max_pixels": 4096})
    assert (found.min_pixels, found.max_pixels, found.max_tokens) == (2048, 4096, 4)
    refused: list[dict[str, object]] = [{"size": {}}, {"max_pixels": 1023}, {"max_pixels": 2**27}]
    refused += [{"max_pixels": True}, {"max_pixels": 2048}]
    for changes in refused:
        with pytest.raises(InvalidParameter, match="mm_processor_kwargs"):
            read_processing(QWEN3_FIELDS, QWEN3_SPEC, changes)
    with pytest.raises(InvalidParameter, match="one size"):
        read_processing(GEMMA3_FIELDS, GEMMA3_SPEC, {"max_pixels": 4096})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("image_processor_type", value) for value in (None, 3, "LlavaImageProcessor")),
        *(("patch_size", 14), ("merge_size", 4), ("temporal_patch_size", 1), ("resample", 1), ("resample", [2])),
        *(("do_rescale", False), ("do_pan_and_scan", True), ("do_pad", True), ("rescale_factor", 0)),
        *(
            ("image_mean", [0.5]),
            ("image_std", [0.5, 0, 0.5]),
            ("image_std", [0.5, float("nan"), 0.5]),
            ("image_mean", "a"),
        ),
        *(
            ("size", 448),
            ("size", {"shortest_edge": 2, "longest_edge": 1}),
            ("size", {"longest_edge": -1}),
            ("size", {"shortest_edge": 2**31 - 1}),
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"preprocessor_config.json.*({field}|min_pixels)"):
        read_processing(QWEN3_FIELDS | {field: value}, QWEN3_SPEC)


def test_images_of_gemma3_have_the_size_of_its_encoder() -> None:
    for size in ({"height": 448, "width": 448}, {"height": 896}):
        with pytest.raises(ConfigError, match="size"):
            read_processing(GEMMA3_FIELDS | {"size": size}, GEMMA3_SPEC)
