"""`GET /v1/models`: the model that this server serves, and its adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.generation.generation import json_response
from quire.server.generation.served_model import choose_model
from quire.server.requests.fields import Fields, RouteFields
from quire.server.state.state import ServerState

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.adapters import LoadedAdapter


async def list_models(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /v1/models`."""
    names = (state.llm.model_name, *state.aliases)
    adapters = [adapter_card(state, adapter) for adapter in state.llm.adapters.loaded]
    return json_response({"object": "list", "data": [*(_card(state, name) for name in names), *adapters]})


async def show_model(state: ServerState, request: Request) -> Response:
    """Answer `GET /v1/models/{id}`."""
    name = request.path_params["model_id"]
    choose_model(state, request, name)
    adapter = next((candidate for candidate in state.llm.adapters.loaded if candidate.name == name), None)
    return json_response(_card(state, name) if adapter is None else adapter_card(state, adapter))


async def read_fields(state: ServerState, request: Request, known: RouteFields) -> Fields:
    """Return the fields of a request for the served model or one of its adapters."""
    fields = Fields(await state.bodies.read_object(request))
    fields.check(known)
    name = fields.text("model")
    if name is not None:
        choose_model(state, request, name)
    return fields


def adapter_card(state: ServerState, adapter: LoadedAdapter) -> dict[str, Any]:
    """Return the entry of an adapter in the list of models."""
    return {**_card(state, adapter.name), "root": adapter.path, "parent": state.llm.model_name}


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "quire",
        "max_model_len": state.llm.resolved.max_model_len,
        "model_impl": state.llm.resolved.model_impl,
        "input_modalities": ["text", "image"] if state.llm.texts.max_images else ["text"],
        "tool_call_parser": None if state.tool_format is None else state.tool_format.name,
        "reasoning_parser": None if state.reasoning is None else state.reasoning.form.name,
    }
