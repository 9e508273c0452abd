"""Patches of an image, as the processors of transformers with torchvision make them from its pixels.

torchvision resizes bytes with PyTorch's own interpolation, which rounds to bytes again; so this does the same, and the
values are equal. The processors with Pillow, and those of other libraries, differ by up to 15 of 255 levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.engine.inputs.images.decoding import Pixels
from quire.errors import InvalidParameter

# A longer side is refused by the reference as well.
MAX_ASPECT: Final = 200


class Patches(NamedTuple):
    """The input of a vision encoder: one image.

    Args:
        values: float32 [rows x columns, channels x frames x side x side]. The patches of a merged square follow each
            other; the squares are in row order.
        rows: number of patches from top to bottom.
        columns: number of patches from left to right.
    """

    values: Tensor
    rows: int
    columns: int


@dataclass(frozen=True)
class ImageProcessing:
    """The conversion of pixels to patches.

    Args:
        patch_size: side of a patch, in pixels.
        merge_size: side of a square of patches that becomes one token, in patches.
        num_frames: number of times that a patch is repeated, for encoders of videos.
        fixed_size: height and width of all images after resizing; None if the size follows from the image.
        min_pixels: minimum number of pixels after resizing, without a fixed size.
        max_pixels: maximum number of pixels after resizing, without a fixed size.
        filter: interpolation of resizing, with antialiasing.
        scale: factor of a byte.
        mean: value that is subtracted from each scaled channel.
        std: value that each channel is then divided by.
    """

    patch_size: int
    merge_size: int
    num_frames: int
    fixed_size: tuple[int, int] | None
    min_pixels: int
    max_pixels: int
    filter: Literal["bilinear", "bicubic"]
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def factor(self) -> int:
        """Side of a token's square, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of an image."""
        height, width = self.fixed_size or (1, self.max_pixels)
        return height * width // self.factor**2

    def reduced(self, num_pixels: int) -> ImageProcessing:
        """Return the processing of images of at most `num_pixels`; unchanged if all images have one size."""
        if self.fixed_size is not None:
            return self
        return replace(self, min_pixels=min(self.min_pixels, num_pixels), max_pixels=min(self.max_pixels, num_pixels))

    def size_of(self, field: str, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of an image after resizing, in pixels.

        Raises:
            InvalidParameter: one side is more than `MAX_ASPECT` times as long as the other.
        """
        if self.fixed_size is not None:
            return self.fixed_size
        if max(height, width) > MAX_ASPECT * min(height, width):
            allowed = f"an image whose sides differ by a factor of at most {MAX_ASPECT}"
            raise InvalidParameter(field, f"{width}x{height} pixels", allowed)
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif rows * columns * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows * factor, columns * factor

    def num_tokens(self, field: str, height: int, width: int) -> int:
        """Return the number of tokens of an image of a size in pixels; see `size_of`."""
        resized = self.size_of(field, height, width)
        return resized[0] * resized[1] // self.factor**2

    def patches_of(self, field: str, pixels: Pixels) -> Patches:
        """Return the patches of an image; see `size_of`."""
        size = self.size_of(field, pixels.height, pixels.width)
        image = torch.frombuffer(bytearray(pixels.rgb), dtype=torch.uint8)
        image = resized(image.view(pixels.height, pixels.width, 3).permute(2, 0, 1), size, self.filter)
        # One rounding for both, as the reference fuses them.
        mean = torch.tensor(self.mean) * (1 / self.scale)
        std = torch.tensor(self.std) * (1 / self.scale)
        values = (image.float() - mean[:, None, None]) / std[:, None, None]
        side, merge = self.patch_size, self.merge_size
        rows, columns = size[0] // side, size[1] // side
        values = values.reshape(3, rows // merge, merge, side, columns // merge, merge, side)
        values = values.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5).expand(-1, -1, -1, -1, -1, self.num_frames, -1, -1)
        return Patches(values.reshape(rows * columns, -1), rows, columns)


def resized(image: Tensor, size: tuple[int, int], filter: Literal["bilinear", "bicubic"]) -> Tensor:
    """Return an image of bytes [3, H, W] in another size, as torchvision resizes it on a CPU."""
    if tuple(image.shape[1:]) == size:
        return image
    return functional.interpolate(image[None], size, mode=filter, align_corners=False, antialias=True)[0]
