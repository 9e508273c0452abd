"""Images of a prompt: from what a user gives to the tokens and media that stand for them.

An image is identified by its patches and their grid before anything encodes it, so a prefix that is hit needs no
encoder. The grid is part of that: as many tokens in another grid give other positions to all that follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from quire.engine.inputs.embeddings import digest_of
from quire.engine.inputs.images.decoding import MAX_PIXELS, ImageDecoder, Pixels
from quire.engine.inputs.images.processing import ImageProcessing
from quire.engine.inputs.images.sources import MAX_BYTES, ImageSources
from quire.engine.inputs.prompt_names import IMAGES
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.memory.prefix.prompt_embeddings import MediaSpan
from quire.models.modules.vision_encoder import ImagePatches
from quire.models.specs.spec import ImageRows
from quire.platform.bounded.files import read_file, reason_of, user_path
from quire.sequences.media import Media
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.chat.images import ChatImage
from quire.text.vocabulary.long_texts import TooManyTokens

# The only kind of data of the field.
KIND: Final = "image"
_ALLOWED: Final = "bytes of an image file, its path as a pathlib.Path, or an image of Pillow"
# Pixels of an image in a chat with `detail: "low"`, as many as OpenAI's models then see.
SMALL_PIXELS: Final = 512 * 512


class NamedImage(NamedTuple):
    """An image of a prompt, and its name in errors."""

    name: str
    value: object
    processing: ImageProcessing


class ImageReader:
    """Reads the images of prompts for one model; thread-safe.

    Args:
        processing: conversion of pixels to patches.
        token_id: token that stands for an image in a prompt.
        image_rows: treatment of the rows of images in the decoder.
        placeholder: text that stands for an image, and the one with the token in its place; None if they are the same.
        form: text for everything else that features follow from: the encoder's dtype and kernels.
        key: secret of at most 64 bytes; see `EmbeddingsReader`.
        token_bytes: number of bytes of a token's features.
        max_images: maximum number of images of a prompt.
        sources: reader of the URLs of conversations.
    """

    def __init__(
        self,
        processing: ImageProcessing,
        token_id: int,
        image_rows: ImageRows,
        form: str,
        key: bytes,
        *,
        placeholder: tuple[str, str] | None = None,
        token_bytes: int,
        max_images: int,
        sources: ImageSources,
    ) -> None:
        self.processing, self.token_id, self.max_images = processing, token_id, max_images
        self._rows, self._placeholder = image_rows, placeholder
        self._small = processing.reduced(SMALL_PIXELS)
        self._token_bytes = token_bytes
        self._form = f"{form} {processing}"
        self._key = key
        self._sources = sources
        self._decoder = ImageDecoder()

    def written(self, prompt: str | ChatPrompt) -> str | ChatPrompt:
        """Return a text with images as it is tokenized: with the text around each image that the model expects."""
        return prompt if self._placeholder is None else prompt.replace(*self._placeholder)

    def read(self, value: object, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], tuple[Media, ...]]:
        """Return a prompt's tokens with as many placeholders as each image has tokens, and the media of these.

        Args:
            value: the field `multi_modal_data`, a mapping with one image or a list of images under `image`: bytes of a
                file, a `Path`, or an image of Pillow. JSON has none of these, so that no client of a server names a
                file of its machine.
            token_ids: tokens of the prompt, with one placeholder for each image.
            max_tokens: maximum number of tokens of the result.

        Raises:
            InvalidParameter: another value, another number of placeholders, too many images, or one that cannot be read
                or decoded; the error names it.
            UnsupportedFeature: Pillow is not installed, and a file must be decoded.
            TooManyTokens: there are more than `max_tokens`.
        """
        if not isinstance(value, Mapping) or set(value) != {KIND}:
            shown = sorted(map(str, value)) if isinstance(value, Mapping) else value
            raise InvalidParameter(IMAGES, shown, 'a mapping with "image"; videos and audio are not supported')
        images = value[KIND]
        whole = list(images) if isinstance(images, list | tuple) else [images]
        name = f"{IMAGES}.{KIND}"
        if len(whole) > self.max_images:
            allowed = f"at most {self.max_images} images (limit_mm_per_prompt)"
            raise InvalidParameter(name, f"{len(whole)} images", allowed)
        count = token_ids.count(self.token_id)
        if count != len(whole):
            allowed = f"a prompt with {len(whole)} tokens {self.token_id}, one for each image"
            raise InvalidParameter("prompt", f"one with {count}", allowed)
        named = [NamedImage(f"{name}[{idx}]", image, self.processing) for idx, image in enumerate(whole)]
        return self._place(token_ids, named, max_tokens)

    def read_chat(
        self, images: Sequence[ChatImage], token_ids: Sequence[int], max_tokens: int
    ) -> tuple[list[int], tuple[Media, ...]]:
        """Return the tokens and media of a rendered conversation; see `read`.

        Args:
            images: images of the conversation, whose number is checked.
            token_ids: tokens of the rendered text, with a placeholder that the template wrote for each image.
            max_tokens: maximum number of tokens of the result.
        """
        count = token_ids.count(self.token_id)
        if count != len(images):
            why = f"the model's chat template writes {count} placeholders for {len(images)} images"
            raise UnsupportedFeature("messages", why)
        named = [
            NamedImage(image.name, self.load(image).source, self._small if image.is_small else self.processing)
            for image in images
        ]
        return self._place(token_ids, named, max_tokens)

    def load(self, image: ChatImage) -> ChatImage:
        """Return an image of a conversation with its file in place of the URL or text that it has, if any.

        A file of the network may take seconds.

        Raises:
            RequestError: see `ImageSources.read`.
        """
        if image.form == "value" or not isinstance(image.source, str):
            return image
        read = self._sources.read if image.form == "url" else self._sources.decode
        return replace(image, source=read(image.name, image.source), form="value")

    def close(self) -> None:
        """End the processes that decode images."""
        self._decoder.close()

    def _place(
        self, token_ids: Sequence[int], images: Sequence[NamedImage], max_tokens: int
    ) -> tuple[list[int], tuple[Media, ...]]:
        placed: list[int] = []
        media: list[Media] = []
        num_tokens, left = len(token_ids), iter(images)
        for token_id in token_ids:
            if token_id != self.token_id:
                placed.append(token_id)
                continue
            name, value, processing = next(left)
            pixels = self._pixels(name, value)
            # Known before the patches, which take most of the memory.
            num_tokens += processing.num_tokens(name, pixels.height, pixels.width) - 1
            if num_tokens > max_tokens:
                raise TooManyTokens(num_tokens, is_exact=len(media) + 1 == len(images))
            image, merge = self._patches_of(name, pixels, processing), processing.merge_size
            rows, columns = image.rows // merge, image.columns // merge
            span = MediaSpan(len(placed), rows * columns, image.digest)
            media.append(Media(span, image, *self._rows.of_grid((rows, columns))))
            placed += [token_id] * (rows * columns)
        return placed, tuple(media)

    def _patches_of(self, field: str, pixels: Pixels, processing: ImageProcessing) -> ImagePatches:
        values, rows, columns = processing.patches_of(field, pixels)
        digest = digest_of(values, f"{self._form} {rows}x{columns} ", self._key)
        num_bytes = rows * columns // processing.merge_size**2 * self._token_bytes
        return ImagePatches(digest, values, rows, columns, num_bytes)

    def _pixels(self, field: str, image: Any) -> Pixels:
        if isinstance(image, bytes | bytearray):
            return self._decoder.decode(field, bytes(image))
        if isinstance(image, Path):
            try:
                data = read_file(user_path(str(image)), MAX_BYTES)
            except (OSError, ValueError) as error:
                raise InvalidParameter(field, str(image), f"a file that can be read: {reason_of(error)}") from error
            return self._decoder.decode(field, data)
        if not all(hasattr(image, name) for name in ("convert", "tobytes", "size", "getexif")):
            raise InvalidParameter(field, image, _ALLOWED)
        width, height = image.size
        if not 0 < width * height <= MAX_PIXELS:
            raise InvalidParameter(field, f"{width}x{height} pixels", f"an image of at most {MAX_PIXELS} pixels")
        try:
            if image.getexif().get(0x112, 1) != 1:  # the user has Pillow, which turns it upright as the decoder does
                from PIL import ImageOps

                image = ImageOps.exif_transpose(image)
            rgb = image.convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:  # it reads its file only now
            raise InvalidParameter(field, image, f"an image that can be decoded: {error}") from error
        return Pixels(rgb.height, rgb.width, rgb.tobytes())
