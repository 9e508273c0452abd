"""The encoder of images of a model, and the reader of its prompts' images."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from importlib.util import find_spec
from typing import NamedTuple

import torch

from quire.config import ModelConfig
from quire.engine.inputs.images.processing import ImageProcessing
from quire.engine.inputs.images.reader import ImageReader
from quire.engine.inputs.images.settings import read_processing, read_settings
from quire.errors import ConfigError
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.token_chain import Namespace
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families.vision_towers import image_token_id
from quire.models.loading.vision import has_vision, load_vision_encoder
from quire.models.modules.vision_encoder import VisionEncoder

logger = logging.getLogger(__name__)


class Vision(NamedTuple):
    """A model's encoder of images, and the processing of its images."""

    encoder: VisionEncoder
    processing: ImageProcessing


def load_vision(options: ModelConfig, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> Vision | None:
    """Load the encoder of images.

    None for a model without one, without Pillow, and where the encoder or its settings are missing or not implemented:
    texts are served, and a line of the log says why images are refused.
    """
    if options.model_impl == "transformers" or not has_vision(checkpoint):
        return None
    if find_spec("PIL") is None:  # found, not imported: this process decodes no images
        logger.info("Images are refused, and their encoder is not loaded: pip install 'quire[vision]'")
        return None
    try:
        encoder = load_vision_encoder(
            checkpoint,
            device=device,
            dtype=dtype,
            kernels=options.kernels,
            quantization=options.quantization,
            weight_packing=options.weight_packing,
        )
        return Vision(encoder, read_processing(read_settings(checkpoint.folder), encoder.spec))
    except ConfigError as error:
        logger.warning("Images are refused: %s", error)
        return None


def open_image_reader(
    vision: Vision | None, checkpoint: Checkpoint, options: ModelConfig, memory: KVCacheManager, parts: ExitStack
) -> ImageReader | None:
    """Return the reader of prompts' images, which `parts` closes; None without an encoder.

    Images are identified with the memory manager's secret, which is stored with a prefix cache on disk.
    """
    if vision is None:
        return None
    form = f"{vision.encoder.dtype} {options.quantization}"
    key = memory.chain([], Namespace("images")).root[0]
    reader = ImageReader(vision.processing, image_token_id(checkpoint.config), form, key)
    parts.callback(reader.close)
    return reader
