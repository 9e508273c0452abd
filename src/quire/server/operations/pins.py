"""`POST /pin_prefix` and `POST /unpin_prefix`: prompts whose blocks stay in the prefix cache."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.inputs.prompts import Prompt
from quire.errors import InvalidParameter
from quire.server.generation.generation import json_response
from quire.server.generation.sampling import NEVER_IGNORED
from quire.server.generation.served_model import lora_request
from quire.server.protocols.chat_completions import render_chat
from quire.server.protocols.models import read_fields
from quire.server.requests.errors import stopping
from quire.server.requests.field_names import naming_prompt
from quire.server.requests.fields import Fields, RouteFields
from quire.server.state.state import ServerState
from quire.server.state.tenants import read_tenant
from quire.text.tool_calls import read_tools

FIELDS: Final = RouteFields(
    honoured=(
        *("model", "name", "prompt", "messages", "tools", "cache_salt", "add_special_tokens"),
        *("add_generation_prompt", "chat_template_kwargs", "reasoning_effort"),
    ),
    refused={
        **NEVER_IGNORED,
        "chat_template": ((), "templates come with the model, never from requests"),
        "continue_final_message": ((False,), "pin the text as a prompt"),
    },
    neutral={},
)


async def pin_prefix(state: ServerState, request: Request) -> Response:
    """Answer `POST /pin_prefix`: compute a prompt if it is not cached, and pin its full blocks under a name."""
    tenant = read_tenant(state.config, request)
    fields = await read_fields(state, request, FIELDS)
    has_prompt, has_messages = fields.get("prompt") is not None, fields.get("messages") is not None
    if has_prompt == has_messages:
        raise InvalidParameter("prompt", fields.get("prompt"), "given, or else messages")
    if state.is_draining:
        raise stopping()
    prompt: Prompt = fields.get("prompt")
    if has_messages:
        # A pin is a prefix of conversations, which continue with any role, not only the assistant's.
        definitions = [tool.definition for tool in read_tools(fields.get("tools"))]
        prompt = await render_chat(state, fields, definitions, add_generation_prompt=False)
    name = _name(fields)
    with naming_prompt(fields):
        num_tokens = await state.llm.pin_prefix(
            name,
            prompt,
            fields.text("cache_salt"),
            tenant=tenant,
            lora_request=lora_request(request),
            add_special_tokens=fields.flag("add_special_tokens", not has_messages),
        )
    return json_response({"name": name, "pinned_tokens": num_tokens})


async def unpin_prefix(state: ServerState, request: Request) -> Response:
    """Answer `POST /unpin_prefix`: release the blocks under a name."""
    tenant = read_tenant(state.config, request)
    await state.llm.unpin_prefix(_name(await read_fields(state, request, FIELDS)), tenant)
    return json_response({})


def _name(fields: Fields) -> str:
    name = fields.text("name")
    if name is None:
        raise InvalidParameter("name", name, "a string")
    return name
