"""Pixels of image files: Pillow's own, and nothing but an error for files that are damaged, hostile or no images."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from quire.engine.inputs.images.decoding import FORMATS, MAX_PIXELS, ImageDecoder, Pixels
from quire.errors import InvalidParameter, UnsupportedFeature

MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
}


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder()
    yield decoder
    decoder.close()


def picture(width: int = 37, height: int = 23, seed: int = 0) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


def file_of(image: Image.Image, name: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, modes in MODES.items() for mode in modes])
def test_pixels_are_those_of_pillow(decoder: ImageDecoder, name: str, mode: str) -> None:
    image = picture().convert("I").convert(mode) if mode == "I;16" else picture().convert(mode)
    data = file_of(image, name)
    wanted = Image.open(BytesIO(data)).convert("RGB")
    assert decoder.decode("image", data) == Pixels(23, 37, wanted.tobytes())


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(decoder: ImageDecoder, name: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    data = file_of(picture(), name, exif=exif.tobytes())
    wanted = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    assert wanted.size == ((37, 23) if orientation < 5 else (23, 37))
    assert decoder.decode("image", data) == Pixels(wanted.height, wanted.width, wanted.tobytes())


def test_of_an_animation_the_first_frame_is_taken(decoder: ImageDecoder) -> None:
    frames = [picture(seed=seed).convert("P") for seed in range(3)]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decoder.decode("image", data).rgb == frames[0].convert("RGB").tobytes()


def png_of(width: int, height: int, rows: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    head = struct.pack("!2I5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data",
    [
        png_of(100_000, 100_000),
        png_of(2**31 - 1, 2**31 - 1),
        b"GIF89a"
        + struct.pack("<2H3B", 65535, 65535, 0, 0, 0)
        + b"\x2c"
        + struct.pack("<4H", 0, 0, 65535, 65535)
        + b"\0\x08\0\x3b",
        b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f\xff\xff\xff\x0f" + b"\0" * 9,
    ],
    ids=["png", "larger_png", "gif", "webp"],
)
def test_pixels_are_counted_before_they_are_decoded(decoder: ImageDecoder, data: bytes) -> None:
    with pytest.raises(InvalidParameter, match=rf"more than {MAX_PIXELS}|limit of memory|cannot identify|could not"):
        decoder.decode("messages[0].content[1]", data)


def test_a_file_that_unpacks_to_more_than_its_pixels_is_no_danger(decoder: ImageDecoder) -> None:
    # 200 MB of zeros behind 4 rows.
    data = png_of(4, 4, b"\0" * 200_000_000)
    assert len(data) < 250_000
    assert decoder.decode("image", data) == Pixels(4, 4, bytes(48))


def test_other_files_are_refused(decoder: ImageDecoder) -> None:
    others = [file_of(picture(), name) for name in ("BMP", "TIFF", "PPM", "TGA", "ICO")]
    for data in (b"", b"\0", b"GIF89a", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.4", *others):
        with pytest.raises(InvalidParameter, match="PNG, JPEG, WEBP or GIF") as refused:
            decoder.decode("images[3]", data)
        assert refused.value.field == "images[3]"


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_file_is_refused_or_decoded_as_pillow_does(decoder: ImageDecoder, name: str) -> None:
    data = file_of(picture(200, 200), name)
    for length in (len(data) // 2, len(data) // 10, 30):
        with pytest.raises(InvalidParameter):
            decoder.decode("image", data[:length])
    assert decoder.decode("image", data).height == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_gives_pixels_or_the_typed_error(decoder: ImageDecoder, name: str) -> None:
    rng = random.Random(name)
    whole = file_of(picture(64, 48), name)
    num_refused = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(min(len(data), 200) if rng.random() < 0.7 else len(data))
            kind = rng.randrange(3)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 9)]
            else:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
        try:
            found = decoder.decode("image", bytes(data))
        except InvalidParameter:
            num_refused += 1
        else:
            assert len(found.rgb) == 3 * found.height * found.width
    assert 0 < num_refused < 500


def test_a_server_never_imports_pillow(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(file_of(picture(), "PNG"))
    code = (
        "import sys; from pathlib import Path; from quire.engine.inputs.images.decoding import ImageDecoder;"
        "decoder = ImageDecoder();"
        "found = decoder.decode('image', Path(sys.argv[1]).read_bytes()); decoder.close();"
        "print(found.height, found.width, 'PIL' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "image.png")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["23", "37", "False"]


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "PIL.py").write_text("raise ImportError('no Pillow here')")
    monkeypatch.syspath_prepend(tmp_path)
    decoder = ImageDecoder()
    with pytest.raises(UnsupportedFeature, match=r"quire\[vision\]"):
        decoder.decode("image", file_of(picture(), "PNG"))
    decoder.close()
