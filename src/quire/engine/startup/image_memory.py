"""The memory that images need besides the weights of their encoder: at start, and planned from configurations alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from quire.config import EngineConfig, StepCost
from quire.engine.inputs.images.processing import ImageProcessing
from quire.engine.inputs.images.settings import FILE, read_processing, read_settings
from quire.engine.startup.vision import Vision, read_changed_processing
from quire.errors import ConfigError
from quire.execution.step.image_features import MAX_FEATURE_BYTES
from quire.models.capacity.step_memory import ImageMemory
from quire.models.checkpoints.checkpoint import Checkpoint, find_gguf, locate
from quire.models.checkpoints.vision_files import find_vision
from quire.models.families.quantization_config import without_quantization
from quire.models.families.vision_towers import build_vision
from quire.models.specs.vision_spec import VisionSpec
from quire.platform.bounded.files import user_path


def with_images(step: StepCost, vision: Vision | None, dtype: torch.dtype) -> StepCost:
    """Return the memory of a step, and of the images between steps."""
    if vision is None:
        return step
    return replace(step, image_bytes=_memory(vision.encoder.spec, vision.processing).num_bytes(dtype.itemsize))


def find_images(config: EngineConfig, raw: Mapping[str, Any]) -> ImageMemory | None:
    """Return the memory of images from configurations alone; None if an engine with these options would read none.

    Args:
        config: options.
        raw: content of the `config.json` of a model whose architecture has an encoder.

    Raises:
        ConfigError: `mmproj` names a file that cannot be served, or `mm_processor_kwargs` has a value that is invalid.
    """
    options = config.model
    if not config.multimodal.max_images or options.model_impl == "transformers":
        return None
    try:
        found = _find_encoder(config, raw)
        if found is None:
            return None
        spec, settings = found
        read_processing(settings, spec)
    except ConfigError:
        if options.mmproj is not None:
            raise
        return None  # images are refused, and texts are served
    return _memory(spec, read_changed_processing(settings, spec, config.multimodal))


def _memory(spec: VisionSpec, processing: ImageProcessing) -> ImageMemory:
    return ImageMemory(spec, processing.max_tokens * spec.merge_size**2, MAX_FEATURE_BYTES)


def _find_encoder(config: EngineConfig, raw: Mapping[str, Any]) -> tuple[VisionSpec, Mapping[str, Any]] | None:
    """Return an encoder, and the fields of its image processor; None without one."""
    options = config.model
    if find_gguf(options.model, options.revision) is not None:
        files = find_vision(Checkpoint.open(options.model, options.revision), options.mmproj)
        built = None if files is None else build_vision(files.config, files.tensors)
        if files is None or built is None or files.image_settings is None:
            return None
        return built[0], files.image_settings
    built = build_vision(without_quantization(raw), ())
    path = user_path(options.model)
    folder = path.parent if path.is_file() else locate(options.model, options.revision, only=FILE)
    return None if built is None else (built[0], read_settings(folder))
