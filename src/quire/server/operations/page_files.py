"""The page: `GET /` and the files under `/page/`, which hold nothing secret and load nothing from elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from quire.server.requests.errors import ApiError
from quire.server.state.state import ServerState

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain"}
HEADERS = {
    # Everything comes from this server: no inline scripts or styles, no frames, no other hosts.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def page(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /` and `GET /page/NAME`."""
    name = request.path_params.get("name", "index.html")
    if name not in page_files():
        raise ApiError(404, f"the page has no such file: {name[:100]}", code="not_found")
    file = await asyncio.to_thread(_read, name)
    # A browser that has the file asks whether it is still the same: most loads transfer nothing.
    body, headers = file.body, {**HEADERS, "ETag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = file.compressed, "gzip"
    return Response(body, media_type=MEDIA_TYPES[name.rpartition(".")[2]], headers=headers)


class PageFile(NamedTuple):
    """A file of the page.

    Args:
        body: its bytes.
        compressed: the bytes by gzip.
        tag: its entity tag.
    """

    body: bytes
    compressed: bytes
    tag: str


@cache
def _read(name: str) -> PageFile:
    """Read a file of the page, once: anybody may ask for it, without a key, and any number of times."""
    body = page_files()[name].read_bytes()
    return PageFile(body, gzip.compress(body, 6), f'W/"{hashlib.sha256(body).hexdigest()[:16]}"')


@cache
def page_files() -> dict[str, Traversable]:
    """Return the files of the page by their paths in its folder: no other path is ever opened."""
    return dict(_files_below(files("quire.server").joinpath("page"), ""))


def _files_below(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files_below(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry
