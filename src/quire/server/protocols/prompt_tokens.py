"""`POST /prompt_tokens`: the data of a request that a router needs before it chooses a server for it.

The body is `{"path": "/v1/chat/completions", "body": {...}}`, the request that is to be routed; the answer is
`{"tokens": [...], "adapter": null, "cache_salt": null}`. The prompt is rendered as by the route itself, for every
protocol, so these tokens will be looked up in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.inputs.request_options import read_namespace
from quire.errors import InvalidParameter
from quire.server.generation.generation import json_response
from quire.server.generation.served_model import ADAPTER, choose_model
from quire.server.generation.tool_use import read_tool_use
from quire.server.protocols import anthropic_messages, ollama, responses
from quire.server.protocols.chat_completions import render_chat
from quire.server.protocols.completions import read_prompts
from quire.server.requests.fields import Fields
from quire.server.state.state import ServerState
from quire.text.chat.chat_prompt import ChatPrompt

COMPLETIONS: Final = "/v1/completions"
# Functions from the fields of a request to the fields of a chat, by route.
CHATS: Final[Mapping[str, Callable[[ServerState, Fields], dict[str, Any]]]] = {
    "/v1/chat/completions": lambda _, fields: fields.as_dict(),
    "/v1/messages": anthropic_messages.read_chat_fields,
    "/v1/responses": lambda _, fields: responses.ResponsesReader(fields).chat,
    "/api/chat": lambda _, fields: ollama.read_conversation(fields),
    "/api/generate": lambda _, fields: ollama.read_prompt(fields),
}


async def prompt_tokens(state: ServerState, request: Request) -> Response:
    """Answer `POST /prompt_tokens`."""
    query = Fields(await state.bodies.read_object(request))
    path, body = query.get("path"), query.object("body")
    if path not in (COMPLETIONS, *CHATS):
        raise InvalidParameter("path", path, f"one of {', '.join((COMPLETIONS, *CHATS))}")
    if body is None:
        raise InvalidParameter("body", None, "an object")
    fields = Fields(body.as_dict())
    name = fields.text("model")
    if name is not None:
        choose_model(state, request, name.removesuffix(ollama.LATEST) if path.startswith("/api/") else name)
    prompt: str | list[int] | ChatPrompt
    if path == COMPLETIONS:
        prompt = read_prompts(fields.get("prompt"), state.config.max_prompts)[0]
        special = fields.flag("add_special_tokens", True)
    else:
        chat = Fields(CHATS[path](state, fields))
        if chat.get("prompt") is not None:  # Ollama's raw prompt
            prompt, special = chat.text("prompt") or "", True
        else:
            use = read_tool_use(state, chat)
            prompt = await render_chat(state, chat, () if use is None else use.definitions)
            special = chat.flag("add_special_tokens", False)
    if isinstance(prompt, list):
        tokens = prompt
    else:
        tokens = await state.llm.texts.encode(prompt, add_special_tokens=special)
    salt = read_namespace("", fields.get("cache_salt"), None).cache_salt
    return json_response({"tokens": tokens, "adapter": request.scope.get(ADAPTER), "cache_salt": salt})
