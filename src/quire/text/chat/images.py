"""Images in messages: what a part says of its image, before anything reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from quire.errors import InvalidParameter

# Types of parts of a message. JSON has no bytes, paths and images of Pillow, so "image" is for Python programs.
IMAGE, IMAGE_URL = "image", "image_url"
# Values of OpenAI's `detail`; "low" limits the pixels of an image as OpenAI's models do.
DETAILS: Final = ("auto", "high", "low")
# The templates' form of an image, whatever its source.
TEMPLATE_PART: Final[Mapping[str, str]] = {"type": "image"}


@dataclass(frozen=True, slots=True)
class ChatImage:
    """An image of a conversation.

    Args:
        source: its URL, its file in base64, or a value of a Python program.
        form: the form of the source.
        name: the client's name of the source, for errors.
        part: the client's name of the part, for a refusal of all images.
        kind: type of the part, as the client states it.
        is_small: True to reduce it to the pixels of `detail: "low"`.
    """

    source: object
    form: Literal["url", "base64", "value"]
    name: str
    part: str
    kind: str
    is_small: bool = False

    @property
    def is_remote(self) -> bool:
        """True if the image is fetched from the network."""
        return self.form == "url" and isinstance(self.source, str) and self.source[:4].lower() == "http"

    @property
    def num_bytes(self) -> int:
        """Length of the URL, the text or the file."""
        return len(self.source) if isinstance(self.source, str | bytes) else 0


def read_image(part: Mapping[str, Any], where: str) -> ChatImage:
    """Return the image of a part of the type `IMAGE` or `IMAGE_URL`; `where` is the name of the part."""
    kind = part["type"]
    if kind == IMAGE:
        if isinstance(part.get("image"), str):
            allowed = "bytes of a file, a pathlib.Path or an image of Pillow; the type image_url is for URLs"
            raise InvalidParameter(f"{where}.image", part["image"], allowed)
        is_small = reads_small(part.get("detail"), f"{where}.detail")
        return ChatImage(part.get("image"), "value", f"{where}.image", f"{where}.type", kind, is_small)
    value, name = part.get("image_url"), f"{where}.image_url"
    fields = {"url": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        raise InvalidParameter(name, value, 'an object like {"url": "data:image/png;base64,..."}')
    name = name if isinstance(value, str) else f"{name}.url"
    is_small = reads_small(fields.get("detail"), f"{where}.image_url.detail")
    return url_image(fields.get("url"), name, f"{where}.type", kind, is_small=is_small)


def url_image(url: object, name: str, part: str, kind: str, *, is_small: bool = False) -> ChatImage:
    """Return the image of a URL; see `ChatImage` for the names."""
    if not isinstance(url, str):
        raise InvalidParameter(name, url, "a data, http or https URL")
    return ChatImage(url, "url", name, part, kind, is_small)


def base64_image(text: object, name: str, part: str, kind: str) -> ChatImage:
    """Return the image of a file in base64; see `ChatImage` for the names."""
    if not isinstance(text, str):
        raise InvalidParameter(name, text, "an image file in base64")
    return ChatImage(text, "base64", name, part, kind)


def reads_small(detail: object, name: str) -> bool:
    """Return whether an image is reduced to the pixels of `detail: "low"`."""
    if detail is not None and detail not in DETAILS:
        raise InvalidParameter(name, detail, f"one of {', '.join(DETAILS)}")
    return detail == "low"
