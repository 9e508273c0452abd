"""Parts of requests that are no text: images, audio, videos and files, which text models do not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.errors import UnsupportedPart

# Fields that hold the data or the address of a part, in requests of several protocols.
MEDIA_FIELDS: Final = (
    *("image", "image_url", "input_image", "images", "audio", "audio_url", "input_audio"),
    *("video", "video_url", "file", "input_file"),
)


def refuse_media(value: object, field: str) -> None:
    """Refuse an object in place of a text if it is a part of another kind.

    Args:
        value: an object, or a list of texts and objects; other values are left to other checks.
        field: name of the value.

    Raises:
        UnsupportedPart: one of them is such a part; the error names it.
    """
    items = value if isinstance(value, list) else [value]
    for idx, item in enumerate(items):
        kind = kind_of_media(item)
        if kind is not None:
            raise UnsupportedPart(field if items is not value else f"{field}[{idx}]", kind)
        if isinstance(item, Mapping) and isinstance(item.get("content"), list):  # a list of parts
            refuse_media(item["content"], f"{field}.content" if items is not value else f"{field}[{idx}].content")


def kind_of_media(item: object) -> str | None:
    """Return the kind of a part that is no text, None for any other value."""
    if not isinstance(item, Mapping):
        return None
    kind = item.get("type")
    if isinstance(kind, str) and kind not in ("text", "input_text"):
        return kind
    return next((name for name in MEDIA_FIELDS if item.get(name) is not None), None)
