"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`: change adapters while the server runs."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidParameter
from quire.sequences.lora import LoRARequest
from quire.server.generation.generation import json_response
from quire.server.protocols.models import adapter_card
from quire.server.requests.errors import ApiError
from quire.server.requests.fields import Fields, RouteFields
from quire.server.state.state import ServerState

FIELDS: Final = RouteFields(
    ("lora_name", "lora_path", "load_inplace"), {}, {"lora_int_id": "the name is what tells adapters apart"}
)


async def load_lora_adapter(state: ServerState, request: Request) -> Response:
    """Answer `POST /v1/load_lora_adapter`: read an adapter's folder, and serve it under a name."""
    fields = await _read(state, request)
    path = fields.text("lora_path")
    if not path:
        raise InvalidParameter("lora_path", path, "the path of a folder on the server's machine")
    lora_request = LoRARequest(_name(fields), lora_path=path, load_inplace=fields.flag("load_inplace"))
    return json_response(adapter_card(state, await state.llm.adapters.load(lora_request)))


async def unload_lora_adapter(state: ServerState, request: Request) -> Response:
    """Answer `POST /v1/unload_lora_adapter`: requests that use the adapter continue, new ones are refused."""
    await state.llm.adapters.unload(_name(await _read(state, request)))
    return json_response({})


async def _read(state: ServerState, request: Request) -> Fields:
    if not state.config.allow_runtime_lora_updating:
        raise ApiError(
            403,
            "adapters are loaded at the start only; --allow-runtime-lora-updating lets these routes read folders of "
            "the server's machine",
            code="runtime_lora_updating_off",
        )
    fields = Fields(await state.bodies.read_object(request))
    fields.check(FIELDS)
    return fields


def _name(fields: Fields) -> str:
    name = fields.text("lora_name")
    if not name:
        raise InvalidParameter("lora_name", name, "a non-empty string")
    return name
