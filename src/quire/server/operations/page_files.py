"""The page: `GET /` and the files under `/page/`, which hold nothing secret and load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from quire.server.requests.errors import ApiError
from quire.server.state.state import ServerState

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    # Everything comes from this server: no inline scripts or styles, no frames, no other hosts.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def page(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /` and `GET /page/NAME`."""
    name = request.path_params.get("name", "index.html")
    folder = files("quire.server").joinpath("page")
    if name not in {file.name for file in folder.iterdir()}:
        raise ApiError(404, f"the page has no such file: {name[:100]}", code="not_found")
    kind = MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(folder.joinpath(name).read_bytes(), media_type=kind, headers=HEADERS)
