"""The encoder of images of a model, and the reader of its prompts' images."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import torch

from quire.config import EngineConfig, ModelConfig, MultimodalConfig, ResolvedConfig
from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.distributed.ranks import Ranks
from quire.engine.control.encoder_work import EncoderWork
from quire.engine.inputs.images.processing import ImageProcessing
from quire.engine.inputs.images.reader import ImageReader
from quire.engine.inputs.images.settings import read_processing, read_settings
from quire.engine.inputs.images.sources import ImageSources
from quire.engine.inputs.ranked_media import tensor_to_json
from quire.engine.startup.kv_cache import digest_of_files
from quire.errors import ConfigError, InvalidParameter
from quire.execution.step.image_features import ImageFeatures
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.token_chain import Namespace
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.vision_files import find_vision
from quire.models.families.vision_towers import find_tower
from quire.models.loading.vision import load_vision_encoder
from quire.models.modules.vision_encoder import VisionEncoder
from quire.models.specs.spec import ModelSpec
from quire.models.specs.vision_spec import VisionSpec
from quire.platform.bounded.files import user_path
from quire.scheduling.command_log import CommandStream

INSTALL: Final = "pip install 'quire[vision]'"

logger = logging.getLogger(__name__)


class Vision(NamedTuple):
    """A model's encoder of images, the processing of its images, and the files of both."""

    encoder: VisionEncoder
    processing: ImageProcessing
    files: Checkpoint


def load_vision(
    options: ModelConfig, images: MultimodalConfig, checkpoint: Checkpoint, device: str, dtype: torch.dtype
) -> Vision | None:
    """Load the encoder of images.

    None for a model without one, without Pillow, with options that allow no images, and if the encoder or its settings
    are missing or not implemented: texts are served, and a line of the log says why images are refused.

    Raises:
        ConfigError: `mm_processor_kwargs` for a model without an encoder, or with a value that it cannot have; or the
            encoder that `mmproj` names cannot be served.
    """
    if not images.max_images:
        logger.info("Images are refused, and their encoder is not loaded: limit_mm_per_prompt allows none")
        return None
    try:
        files = None if options.model_impl == "transformers" else find_vision(checkpoint, options.mmproj)
        if files is not None and find_spec("PIL") is None:  # found, not imported: this process decodes no images
            if options.mmproj is not None:
                raise ConfigError(f"mmproj {options.mmproj} needs Pillow: {INSTALL}", field="mmproj")
            logger.info("Images are refused, and their encoder is not loaded: %s", INSTALL)
            return None
        if files is not None:
            encoder = load_vision_encoder(
                files,
                device=device,
                dtype=dtype,
                kernels=options.kernels,
                quantization=options.quantization,
                weight_packing=options.weight_packing,
            )
            settings = read_settings(files.folder) if files.image_settings is None else files.image_settings
            read_processing(settings, encoder.spec)
    except ConfigError as error:
        if options.mmproj is not None:
            raise
        logger.warning("Images are refused: %s", error)
        return None
    if files is None:
        if images.mm_processor_kwargs:
            raise ConfigError("mm_processor_kwargs needs a model that reads images", field="mm_processor_kwargs")
        return None
    if files is not checkpoint:
        logger.info("Images are encoded by %s", files.gguf_path)
    return Vision(encoder, read_changed_processing(settings, encoder.spec, images), files)


def read_changed_processing(settings: Mapping[str, Any], spec: VisionSpec, images: MultimodalConfig) -> ImageProcessing:
    """Return the processing of images with a user's changes.

    Raises:
        ConfigError: `mm_processor_kwargs` has a value that the model cannot have.
    """
    try:
        return read_processing(settings, spec, images.processor_changes)
    except InvalidParameter as error:
        raise ConfigError(str(error), field="mm_processor_kwargs") from error


def open_features(
    vision: Vision | None, disk: DiskBlocks | None, parts: ExitStack, followed: Checkpoint | None
) -> ImageFeatures | None:
    """Return the features of images, kept beside the prefix cache on disk as well; `parts` drops them.

    Args:
        vision: the encoder; None without one.
        disk: the disk tier; None without one.
        parts: closes the features.
        followed: the model, on a rank that has no encoder and gets the features of another one; None on that one.
    """
    if vision is None and (followed is None or find_tower(followed.config) is None):
        return None
    encoder = None if vision is None else vision.encoder
    features = ImageFeatures(encoder, None if disk is None or encoder is None else disk.disk)
    parts.callback(features.close)
    return features


def make_encoder_work(
    features: ImageFeatures | None, max_inter_token_ms: float | None, commands: CommandStream | None
) -> EncoderWork | None:
    """Return the encoder's schedule, None without features; with `commands`, features are sent to the other ranks."""
    if features is None:
        return None
    work = EncoderWork(features, max_inter_token_ms)

    def send(digest: bytes) -> None:
        assert commands is not None
        commands.put("features", digest.hex(), *tensor_to_json(features.of(digest)))

    if commands is not None:
        work.on_features = send
    return work


def open_image_reader(
    vision: Vision | None,
    spec: object,
    checkpoint: Checkpoint,
    config: EngineConfig,
    resolved: ResolvedConfig,
    memory: KVCacheManager,
    parts: ExitStack,
    ranks: Ranks | None,
) -> ImageReader | None:
    """Return the reader of prompts' images, which `parts` closes; None without an encoder.

    Images are identified with the memory manager's secret, which is stored with a prefix cache on disk.

    Raises:
        ConfigError: `allowed_local_media_path` is no folder, or a step has no room for an image that must be in one.
    """
    if vision is None:
        return None
    tower = find_tower(checkpoint.config)
    assert isinstance(spec, ModelSpec), "an encoder of images beside another model than a decoder"
    assert tower is not None, "an encoder of images of another architecture"
    # Each other sequence may have a token in the step that has a whole image.
    least = resolved.max_num_seqs + vision.processing.max_tokens
    if spec.image_rows.see_each_other and resolved.max_num_batched_tokens < least:
        raise ConfigError(
            f"max_num_batched_tokens must be at least {least}, got {resolved.max_num_batched_tokens}: a step must hold"
            f" an image of {vision.processing.max_tokens} tokens beside max_num_seqs ({resolved.max_num_seqs})",
            field="max_num_batched_tokens",
        )
    images = config.multimodal
    folder = None if images.allowed_local_media_path is None else user_path(images.allowed_local_media_path)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"allowed_local_media_path {folder} is no folder", field="allowed_local_media_path")
    encoder = vision.encoder
    form = f"{encoder.dtype} {config.model.quantization}"
    if config.cache.has_stores and vision.files is not checkpoint:
        # Keys and values after an image, which outlive this engine, depend on files that other ranks do not have.
        form += f" {digest_of_files(vision.files, config.cache, ranks)}"
    key = memory.chain([], Namespace("images")).root[0]
    reader = ImageReader(
        vision.processing,
        tower.image_token(checkpoint.config),
        spec.image_rows,
        form,
        key,
        placeholder=tower.placeholder_of(checkpoint.config),
        token_bytes=encoder.spec.num_features * encoder.spec.out_width * encoder.dtype.itemsize,
        max_images=images.max_images,
        sources=ImageSources(images.allowed_media_domains, folder),
    )
    parts.callback(reader.close)
    return reader
