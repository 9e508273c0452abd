"""Patches of images against the processors of transformers: sizes and grids exact, values equal to torchvision's."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from quire.engine.inputs.images.decoding import Pixels
from quire.engine.inputs.images.processing import ImageProcessing, Patches
from quire.errors import InvalidParameter
from quire.models.modules.vision_encoder import PatchGrid

HALF = (0.5, 0.5, 0.5)
QWEN3 = ImageProcessing(16, 2, 2, None, 65_536, 1_048_576, "bicubic", 1 / 255, HALF, HALF)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
QWEN2 = ImageProcessing(14, 2, 2, None, 3136, 200_000, "bicubic", 1 / 255, CLIP_MEAN, CLIP_STD)
ROOT = Path(__file__).parents[2]
GEMMA3 = ImageProcessing(14, 4, 1, (896, 896), 0, 0, "bilinear", 1 / 255, HALF, HALF)
PROCESSINGS = {"qwen3": QWEN3, "qwen2": QWEN2, "gemma3": GEMMA3}


def sizes(count: int) -> list[tuple[int, int]]:
    """Return widths and heights: of icons, thumbnails, photographs and strips."""
    rng = random.Random(7)
    ranges = [((1, 40), (1, 40)), ((30, 900), (30, 900)), ((800, 2000), (200, 1200)), ((1, 8), (20, 1500))]
    made = [(rng.randint(*across), rng.randint(*down)) for across, down in (ranges[idx % 4] for idx in range(count))]
    return [(width, height) for width, height in made if max(width, height) <= 200 * min(width, height)]


def picture(width: int, height: int) -> Image.Image:
    """Return a picture with edges and noise."""
    coarse = Image.frombytes("RGB", (9, 7), random.Random(width * 4099 + height).randbytes(189))
    noise = Image.frombytes("L", (width, height), random.Random(height).randbytes(width * height))
    return Image.blend(coarse.resize((width, height), Image.Resampling.NEAREST), noise.convert("RGB"), 0.3)


def patches_of(processing: ImageProcessing, image: Image.Image) -> Patches:
    return processing.patches_of("image", Pixels(image.height, image.width, image.tobytes()))


def qwen_options(processing: ImageProcessing) -> dict[str, Any]:
    return {
        "patch_size": processing.patch_size,
        "merge_size": processing.merge_size,
        "temporal_patch_size": processing.num_frames,
        "size": {"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
        "image_mean": list(processing.mean),
        "image_std": list(processing.std),
    }


@pytest.mark.parametrize("processing", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
def test_grids_are_those_of_the_reference(processing: ImageProcessing) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    reference = Qwen2VLImageProcessorPil(**qwen_options(processing))
    for width, height in sizes(40):
        image = picture(width, height)
        wanted, found = reference(image, return_tensors="pt"), patches_of(processing, image)
        assert [[1, found.rows, found.columns]] == wanted["image_grid_thw"].tolist()
        assert processing.num_tokens("image", height, width) == found.rows * found.columns // 4 <= processing.max_tokens
        # It resizes by other arithmetic.
        levels = (found.values - wanted["pixel_values"]).abs().max() * max(processing.std) * 255
        assert levels < 40


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("qwen3", 200), ("qwen2", 200), ("gemma3", 40)])
def test_values_are_those_of_torchvision(name: str, count: int) -> None:
    folder = os.environ.get("QUIRE_TORCHVISION")
    if folder is None:
        pytest.skip("QUIRE_TORCHVISION names no folder of `pip install --no-deps --target FOLDER torchvision`")
    command = [sys.executable, "-m", "tests.images.compare_torchvision", folder, name, str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_image_of_the_right_size_is_not_resized() -> None:
    image = picture(448, 320)
    found = patches_of(replace(QWEN3, num_frames=1), image)
    rows, columns = PatchGrid(20, 28, 2).places(torch.device("cpu"))
    bytes_of = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(320, 448, 3)
    for idx in (0, 1, 2, 57, 559):
        row, column = int(rows[idx]) * 16, int(columns[idx]) * 16
        square = bytes_of[row : row + 16, column : column + 16].permute(2, 0, 1).flatten().float()
        torch.testing.assert_close(found.values[idx], square / 127.5 - 1)


def test_a_strip_is_refused_by_its_size() -> None:
    with pytest.raises(InvalidParameter, match="factor of at most 200") as refused:
        QWEN3.num_tokens("messages[1].content[0]", 1, 201)
    assert refused.value.field == "messages[1].content[0]"
    assert GEMMA3.num_tokens("image", 1, 5000) == 256
