"""The processing of a checkpoint's images, from `preprocessor_config.json` or `processor_config.json`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from quire.engine.inputs.images.processing import ImageProcessing
from quire.errors import CheckpointError, InvalidParameter, UnsupportedModel, shown
from quire.models.checkpoints.checkpoint import read_object
from quire.models.specs.vision_spec import VisionSpec

FILE: Final = "preprocessor_config.json"
# Newer checkpoints have the fields in an object of this file.
JOINED_FILE, JOINED_FIELD = "processor_config.json", "image_processor"
# Classes of transformers, which differ in how an image's size follows; a `Fast` at the end means nothing any more.
BY_PIXELS: Final = frozenset({"Qwen2VLImageProcessor", "Qwen3VLImageProcessor"})
FIXED: Final = frozenset({"Gemma3ImageProcessor"})
# Steps that are always taken, and their only values.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "do_resize": (None, True),
    "do_rescale": (None, True),
    "do_normalize": (None, True),
    "do_convert_rgb": (None, True),
    "do_pan_and_scan": (None, False),
    "do_pad": (None, False),
}
# Pillow's numbers of filters -> PyTorch's name of the interpolation.
FILTERS: Final[Mapping[int, Literal["bilinear", "bicubic"]]] = {2: "bilinear", 3: "bicubic"}
# Fields that a user may change: they say how large an image may be.
CHANGEABLE: Final = ("max_pixels", "min_pixels")
MAX_IMAGE_PIXELS: Final = 1 << 26


def read_settings(folder: Path) -> Mapping[str, Any]:
    """Return the fields of a checkpoint's image processor.

    Raises:
        CheckpointError: a file cannot be read, or there is none.
    """
    if (folder / FILE).exists():
        return read_object(folder / FILE)
    if (folder / JOINED_FILE).exists():
        fields = read_object(folder / JOINED_FILE).get(JOINED_FIELD)
        if isinstance(fields, Mapping):
            return fields
    raise CheckpointError(
        f"{folder} has neither {FILE} nor {JOINED_FILE} with {JOINED_FIELD}, and its model reads images"
    )


def read_processing(
    fields: Mapping[str, Any], spec: VisionSpec, changes: Mapping[str, object] | None = None
) -> ImageProcessing:
    """Return how images are processed for an encoder.

    Args:
        fields: fields of the image processor.
        spec: the encoder.
        changes: fields that the user changes, of `CHANGEABLE`.

    Raises:
        CheckpointError: a field is missing or invalid, or does not fit the encoder.
        UnsupportedModel: a processor, or a value of a field, that is not implemented.
        InvalidParameter: a change that does not exist, or is out of range.
    """
    settings = _Settings(fields)
    name = settings.text("image_processor_type").removesuffix("Fast")
    if name not in BY_PIXELS | FIXED:
        known = ", ".join(sorted(BY_PIXELS | FIXED))
        raise settings.unsupported("image_processor_type", name, known)
    for field, allowed in NEUTRAL.items():
        if fields.get(field) not in allowed:
            raise settings.unsupported(field, fields[field], repr(allowed[-1]))
    resample = settings.integer("resample", 3 if name in BY_PIXELS else 2)
    if resample not in FILTERS:
        raise settings.unsupported("resample", resample, " or ".join(map(str, FILTERS)))
    side, num_frames = spec.patch_shape[-1], spec.patch_shape[1] if len(spec.patch_shape) == 4 else 1
    if spec.patch_shape[0] != 3:
        raise UnsupportedModel(f"images have 3 channels, and the encoder reads {spec.patch_shape[0]}")
    size = settings.part("size")
    fixed: tuple[int, int] | None = None
    least = most = 0
    if name in FIXED:
        fixed = size.integer("height"), size.integer("width")
        whole = side * spec.table_side
        if fixed != (whole, whole):
            raise CheckpointError(f"{FILE}: size must be {whole}x{whole} as the encoder's, got {fixed[0]}x{fixed[1]}")
        if changes:
            raise InvalidParameter("mm_processor_kwargs", dict(changes), "empty: images of this model have one size")
    else:
        for field, wanted in (
            ("patch_size", side),
            ("merge_size", spec.merge_size),
            ("temporal_patch_size", num_frames),
        ):
            if (found := settings.integer(field, wanted)) != wanted:
                raise CheckpointError(f"{FILE}: {field} must be {wanted} as the encoder's, got {found}", field=field)
        # Older files have other names for the limits.
        shortest = size.integer("shortest_edge", 56 * 56, MAX_IMAGE_PIXELS)
        longest = size.integer("longest_edge", 28 * 28 * 1280, MAX_IMAGE_PIXELS)
        least = settings.integer("min_pixels", shortest, MAX_IMAGE_PIXELS)
        most = settings.integer("max_pixels", longest, MAX_IMAGE_PIXELS)
        least, most = _changed(least, most, changes or {}, side * spec.merge_size)
    return ImageProcessing(
        patch_size=side,
        merge_size=spec.merge_size,
        num_frames=num_frames,
        fixed_size=fixed,
        min_pixels=least,
        max_pixels=most,
        filter=FILTERS[resample],
        scale=settings.number("rescale_factor", 1 / 255),
        mean=settings.channels("image_mean", least=0.0),
        std=settings.channels("image_std", least=sys.float_info.min),
    )


def _changed(least: int, most: int, changes: Mapping[str, object], factor: int) -> tuple[int, int]:
    """Return the limits of pixels after a user's changes."""
    for field, value in changes.items():
        if field not in CHANGEABLE:
            raise InvalidParameter(f"mm_processor_kwargs.{field}", value, f"one of {', '.join(CHANGEABLE)}")
        if type(value) is not int or not factor**2 <= value <= MAX_IMAGE_PIXELS:
            allowed = f"an integer from {factor**2} (a token) to {MAX_IMAGE_PIXELS}"
            raise InvalidParameter(f"mm_processor_kwargs.{field}", value, allowed)
        least, most = (value, most) if field == "min_pixels" else (least, value)
    if least > most:
        if changes:
            raise InvalidParameter("mm_processor_kwargs", dict(changes), f"min_pixels at most max_pixels ({most})")
        raise CheckpointError(f"{FILE}: min_pixels ({least}) must be at most max_pixels ({most})", field="min_pixels")
    return least, most


class _Settings:
    """Fields of the file, checked when they are read."""

    def __init__(self, fields: Mapping[str, Any], prefix: str = "") -> None:
        self._fields, self._prefix = fields, prefix

    def integer(self, name: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        allowed = f"an integer from 1 to {most}"
        return int(self._read(name, default, lambda value: type(value) is int and 0 < value <= most, allowed))

    def number(self, name: str, default: float) -> float:
        return float(self._read(name, default, lambda value: _is_number(value) and value > 0, "a positive number"))

    def text(self, name: str) -> str:
        return str(self._read(name, None, lambda value: isinstance(value, str), "a string"))

    def part(self, name: str) -> _Settings:
        return _Settings(self._read(name, {}, lambda value: isinstance(value, Mapping), "an object"), f"{name}.")

    def channels(self, name: str, least: float) -> tuple[float, float, float]:
        def is_valid(value: object) -> bool:
            return (
                isinstance(value, list) and len(value) == 3 and all(_is_number(one) and one >= least for one in value)
            )

        red, green, blue = self._read(name, None, is_valid, "a list of 3 numbers, one for each channel")
        return float(red), float(green), float(blue)

    def unsupported(self, name: str, value: object, allowed: str) -> UnsupportedModel:
        text = f"{FILE}: {self._prefix}{name} is {shown(value)}, but only {allowed} is implemented"
        return UnsupportedModel(text, field=name)

    def _read(self, name: str, default: object, is_valid: Callable[[Any], bool], allowed: str) -> Any:
        value = self._fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{FILE} lacks the field {self._prefix}{name}", field=name)
        if not is_valid(value):
            raise CheckpointError(f"{FILE}: {self._prefix}{name} must be {allowed}, got {shown(value)}", field=name)
        return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
