"""The tenant of a request, from a header that a gateway sets; requests of one tenant share cached prefixes."""

from __future__ import annotations

from starlette.requests import Request

from quire.engine.inputs.request_options import MAX_TENANT_BYTES
from quire.server.requests.errors import ApiError
from quire.server.settings import ServerConfig


def read_tenant(config: ServerConfig, request: Request) -> str | None:
    """Return the tenant of a request; None if all clients are one tenant."""
    name = config.tenant_header
    if name is None:
        return None
    # Only space and tab are blank in a header: other bytes may be part of a character.
    values = [value.strip(" \t") for value in request.headers.getlist(name)]
    length = len(values[0].encode()) if len(values) == 1 else 0
    if 0 < length <= MAX_TENANT_BYTES:
        return values[0]
    got = f"{length} bytes" if length else "an empty one"
    if len(values) != 1:
        got = f"{len(values)} of them" if values else "none"
    why = f"the header {name} must be there once and name a tenant in at most {MAX_TENANT_BYTES} bytes, got {got}"
    raise ApiError(400, why, code="no_tenant", param=name)
