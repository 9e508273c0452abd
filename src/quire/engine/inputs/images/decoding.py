"""Pixels of image files, decoded by Pillow in a process with limits of time and memory.

Decoders of images are the parts of a server that attackers reach first. So this process never imports Pillow: a file
goes to a process that reads its head, counts its pixels, and decodes it only if they are few enough. What comes back
is a size and that many pixels, checked here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, NamedTuple

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.platform.bounded.process import BoundedProcess, LimitExceeded, ProcessPool

# Names of formats as Pillow knows them. Of an animation, the first frame is decoded.
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
# As many as most cameras take. WebP, opacity and 16 bits need more memory, which suffices for some 15 million.
MAX_PIXELS: Final = 25_000_000
MEMORY_BYTES: Final = 300 << 20
TIMEOUT_S: Final = 10.0
MAX_PROCESSES: Final = 2
_ALLOWED: Final = f"an image of {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


class Pixels(NamedTuple):
    """A decoded image.

    Args:
        height: number of rows.
        width: number of pixels in a row.
        rgb: red, green and blue of each pixel, a byte each, row by row from the top.
    """

    height: int
    width: int
    rgb: bytes


class ImageDecoder:
    """Decodes images in separate processes, which start when they are needed; thread-safe."""

    def __init__(self) -> None:
        self._processes = ProcessPool(
            lambda: BoundedProcess(f"{__name__}:open_decoder", b"", MEMORY_BYTES), MAX_PROCESSES
        )

    def decode(self, field: str, data: bytes) -> Pixels:
        """Return the pixels of an image file, turned upright as its EXIF orientation says, without opacity.

        Args:
            field: name of the image, for errors.
            data: content of the file.

        Raises:
            InvalidParameter: it is no image of a format that is decoded, is damaged, or exceeds a limit.
            UnsupportedFeature: Pillow is not installed.
            WorkerError: the process does not start.
        """
        try:
            with self._processes.process() as process:
                answer = process.ask(data, TIMEOUT_S)
        except LimitExceeded as error:
            unit = f"{TIMEOUT_S:g} s" if error.limit == "time" else f"{MEMORY_BYTES >> 20} MiB"
            allowed = f"{_ALLOWED} that is decoded within the limit of {error.limit}, {unit}"
            raise InvalidParameter(field, f"an image of {len(data)} bytes", allowed) from error
        head, _, rgb = answer.partition(b"\n")
        read = json.loads(head)
        if "missing" in read:
            raise UnsupportedFeature(field, f"Pillow is not installed ({read['missing']}): pip install 'quire[vision]'")
        if "reason" in read:
            raise InvalidParameter(field, f"{len(data)} bytes: {read['reason']}", _ALLOWED)
        height, width = read["size"]
        if not 0 < height * width <= MAX_PIXELS or len(rgb) != 3 * height * width:
            raise InvalidParameter(field, f"{len(rgb)} bytes for {width}x{height} pixels", _ALLOWED)
        return Pixels(height, width, rgb)

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


# ---- code of the process ----


def open_decoder(_setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that decodes a file; called in the separate process."""
    from io import BytesIO

    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        missing = json.dumps({"missing": str(error)}).encode() + b"\n"
        return lambda _data: missing
    Image.init()  # all plug-ins, before memory is limited
    Image.MAX_IMAGE_PIXELS = None  # counted below, by one rule

    def answer(data: bytes) -> bytes:
        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS:
                return _refusal(f"{width}x{height} pixels, more than {MAX_PIXELS}")
            # In this order, and without a background behind transparent parts, as the reference loads images.
            ImageOps.exif_transpose(image, in_place=True)
            rgb = image.convert("RGB")
            del image
            head = json.dumps({"size": [rgb.height, rgb.width]}).encode()
            return b"\n".join([head, rgb.tobytes()])
        except MemoryError:
            raise
        except Exception as error:  # plug-ins raise nearly anything for a damaged file
            return _refusal(f"{type(error).__name__}: {error}"[:200])

    return answer


def _refusal(reason: str) -> bytes:
    return json.dumps({"reason": reason}).encode() + b"\n"
