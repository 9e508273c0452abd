"""`GET /v1/models`: the model that this server serves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import ApiError
from quire.server.fields import Fields, Refusal
from quire.server.generation import json_response
from quire.server.state import ServerState


async def list_models(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /v1/models`."""
    names = (state.llm.model_name, *state.aliases)
    return json_response({"object": "list", "data": [_card(state, name) for name in names]})


async def show_model(state: ServerState, request: Request) -> Response:
    """Answer `GET /v1/models/{id}`."""
    name = request.path_params["model_id"]
    check_name(state, name)
    return json_response(_card(state, name))


async def read_fields(
    state: ServerState, request: Request, unsupported: Mapping[str, Refusal], known: Collection[str]
) -> Fields:
    """Return the fields of a request for the served model.

    Args:
        state: state of the server.
        request: HTTP request.
        unsupported: fields that are refused, see `Fields.refuse`.
        known: fields that the route knows; others are ignored, and logged.

    Raises:
        RequestError: the body is no object, or a field is refused.
        ApiError: 404, another model.
    """
    fields = Fields(await state.bodies.read_object(request))
    fields.refuse(unsupported)
    fields.log_unknown(known)
    check_model(state, fields)
    return fields


def check_model(state: ServerState, fields: Fields) -> None:
    """Check that a request names the served model or none.

    Raises:
        InvalidParameter: `model` is not a string.
        ApiError: 404, another model.
    """
    name = fields.text("model")
    if name is not None:
        check_name(state, name)


def check_name(state: ServerState, name: str) -> None:
    """Check a model's name.

    Raises:
        ApiError: 404, another model.
    """
    if name != state.llm.model_name and name not in state.aliases:
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist; this server has {state.llm.model_name!r}",
            code="model_not_found",
            param="model",
        )


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "quire",
        "max_model_len": state.llm.resolved.max_model_len,
        "tool_call_parser": None if state.tool_format is None else state.tool_format.name,
        "reasoning_parser": None if state.reasoning is None else state.reasoning.form.name,
    }
