"""Comparison of patches with the processors of transformers that use torchvision: `python -m ... FOLDER NAME COUNT`.

In a process of its own, since transformers looks for torchvision when it is imported. The package of torchvision fails
to import beside a CPU build of torch, for names of operators that are not there; resizing uses none of them, so the
names are declared first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


def import_torchvision(folder: str) -> object:
    """Import torchvision from a folder; return what declares its operators, which end with it."""
    sys.path.append(folder)
    text = (Path(folder) / "torchvision/_meta_registrations.py").read_text(encoding="utf-8")
    make: Callable[..., Any] = torch.library.Library
    library = make("torchvision", "DEF")
    for name in sorted({"".join(match) for match in re.findall(r'torchvision::(\w+)|register_meta\("(\w+)"', text)}):
        library.define(f"{name}(Tensor x) -> Tensor")
    import_module("torchvision")

    return library


def main(folder: str, name: str, count: int) -> None:
    """Compare the patches of `count` pictures; all values must be equal."""
    library = import_torchvision(folder)
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    from quire.models.modules.vision_encoder import PatchGrid
    from tests.images import test_processing as tests

    processing = tests.PROCESSINGS[name]
    rows, columns = PatchGrid(64, 64, 4).places(torch.device("cpu"))
    for width, height in tests.sizes(count):
        image = tests.picture(width, height)
        found = tests.patches_of(processing, image)
        if processing.fixed_size is None:
            wanted = Qwen2VLImageProcessor(**tests.qwen_options(processing))(image, return_tensors="pt")
            assert wanted["image_grid_thw"].tolist() == [[1, found.rows, found.columns]]
            values = wanted["pixel_values"]
        else:
            pixels = Gemma3ImageProcessor(size={"height": 896, "width": 896})(image, return_tensors="pt")[
                "pixel_values"
            ]
            values = pixels[0].unfold(1, 14, 14).unfold(2, 14, 14)[:, rows, columns].transpose(0, 1).flatten(1)
        assert torch.equal(found.values, values), (width, height, (found.values - values).abs().max())
    del library


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
