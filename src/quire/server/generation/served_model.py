"""The model that an HTTP request selects by name: the server's model, or an adapter of it."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from quire.sequences.lora import LoRARequest
from quire.server.requests.errors import ApiError
from quire.server.state.state import ServerState

# Key of the ASGI scope with the name of the adapter that a request selects.
ADAPTER: Final = "quire.adapter"


def choose_model(state: ServerState, request: Request, name: str) -> None:
    """Select the model or the adapter of a name for a request."""
    if name == state.llm.model_name or name in state.aliases:
        return
    adapters = [adapter.name for adapter in state.llm.adapters.loaded]
    if name not in adapters:
        shown = ", ".join(map(repr, (state.llm.model_name, *adapters[:8]))) + (", ..." if len(adapters) > 8 else "")
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist; this server has {shown}",
            code="model_not_found",
            param="model",
        )
    request.scope[ADAPTER] = name


def model_name(state: ServerState, request: Request) -> str:
    """Return the name of the model or adapter that a request selects."""
    name: str = request.scope.get(ADAPTER, state.llm.model_name)
    return name


def lora_request(request: Request) -> LoRARequest | None:
    """Return the adapter that a request selects; None for the model without an adapter."""
    name = request.scope.get(ADAPTER)
    return None if name is None else LoRARequest(name)
