"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: conversations in Anthropic's form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature, UnsupportedPart, shown
from quire.server.admission.usage import TokenCount
from quire.server.generation.generation import json_response
from quire.server.generation.sampling import LABELS, NEVER_IGNORED
from quire.server.generation.served_model import model_name
from quire.server.http import sse
from quire.server.protocols.chat_completions import ChatExtras
from quire.server.protocols.chat_protocols import (
    NO_WISH,
    OWN_OPTIONS,
    Reasoning,
    SampleParts,
    answer_chat,
    arguments_object,
    count_chat,
    joined_content,
    read_content,
    read_list,
    read_object,
    read_text,
    required_text,
    thinking_switch,
)
from quire.server.protocols.models import read_fields
from quire.server.requests.errors import REQUEST_ID, ApiError
from quire.server.requests.fields import Fields, RouteFields
from quire.server.state.state import ServerState
from quire.text.chat.images import ChatImage, base64_image, url_image
from quire.text.chat.messages import SANITIZE
from quire.text.tool_calls import CallDelta
from quire.text.tool_calls.calls import Piece

SAME_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "stream", *OWN_OPTIONS)
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
# The one edit that keeps all of a conversation.
KEPT_THINKING: Final = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
FIELDS: Final = RouteFields(
    honoured=(
        *SAME_FIELDS,
        *("model", "system", "messages", "tools", "tool_choice", "stop_sequences"),
        *("thinking", "thinking.type", "thinking.budget_tokens", "thinking.display"),
        *("output_config", "output_config.format", "output_config.effort"),
        *("tool_choice.type", "tool_choice.name", "tool_choice.disable_parallel_tool_use"),
    ),
    refused={
        **NEVER_IGNORED,
        "container": ((), "the server runs no code"),
        "mcp_servers": (([],), "the server connects to no other one"),
        "speed": (("standard",), "there is one speed"),
        "service_tier": (("auto", "standard_only"), "there is one tier"),
        "inference_geo": (("global", "not_available"), "the server computes where it is"),
        "context_management": (({}, {"edits": []}, KEPT_THINKING), "the conversation is used as it is"),
        "compaction": ((), "the server summarises no conversation"),
        "thread": ((), "the server stores no messages; send the whole conversation"),
        "output_config.task_budget": ((), "use max_tokens"),
        "output_format": ((), "it is an older name of output_config.format"),
    },
    neutral={
        "metadata": LABELS["metadata"],
        "user_profile_id": LABELS["metadata"],
        "workspace_id": LABELS["metadata"],
        "cache_control": LABELS["prompt_cache_key"],
        "diagnostics": "the log and /kv have the reasons of cache misses",
        "billing_policy": "nothing is billed",
        "fallbacks": "the server declines no request on account of its contents",
        "fallback_credit_token": "nothing is billed",
        "betas": "a header of the protocol, without effect",
    },
    objects=("thinking", "output_config", "tool_choice"),
)
# Patterns of a chat's fields -> the protocol's names.
NAMES: Sequence[tuple[str, str]] = (
    (r"^stop\b", "stop_sequences"),
    (r"^parallel_tool_calls$", "tool_choice.disable_parallel_tool_use"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^thinking_token_budget$", "thinking.budget_tokens"),
    (r"\.function\.parameters", ".input_schema"),
    (r"\.function\b", ""),
)
NOT_KNOWN = "runs on Anthropic's servers or clients; only tools with an input_schema are known"
MEDIA_TYPES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")
# Blocks that are read, some of them for one role.
KNOWN_BLOCKS = frozenset({"text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"})
CHOICES: Mapping[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
FORMAT = sse.StreamFormat(is_named=True, ping='event: ping\ndata: {"type":"ping"}\n\n')


async def messages(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /v1/messages`."""
    fields = await read_fields(state, request, FIELDS)
    if fields.get("max_tokens") is None:
        raise InvalidParameter("max_tokens", None, "an integer of at least 1")
    answer_id = f"msg_{request.scope[REQUEST_ID]}"
    name = model_name(state, request)
    return await answer_chat(
        state,
        request,
        read_chat_fields(state, fields),
        lambda extras: MessageReply(answer_id, name, extras),
        answer_id,
        rename,
    )


async def count_tokens(state: ServerState, request: Request) -> Response:
    """Answer `POST /v1/messages/count_tokens`: the length of the prompt, as `usage` would have it."""
    fields = await read_fields(state, request, FIELDS)
    return json_response({"input_tokens": await count_chat(state, read_chat_fields(state, fields), rename)})


def rename(field: str) -> str:
    """Return the protocol's name of a field of a chat."""
    for pattern, name in NAMES:
        field = re.sub(pattern, name, field, count=1)
    return field


def read_chat_fields(state: ServerState, fields: Fields) -> dict[str, Any]:
    """Convert a request to the fields of a chat."""
    chat = {name: fields.get(name) for name in SAME_FIELDS}
    chat["messages"] = [*_read_system(fields), *_read_messages(fields)]
    stop = fields.get("stop_sequences")
    if stop is not None and not isinstance(stop, list):
        raise InvalidParameter("stop_sequences", stop, "a list of strings")
    chat["stop"] = stop
    chat["tools"] = _read_tools(fields.get("tools"))
    chat |= _read_choice(fields)
    config = fields.object("output_config")
    form = None if config is None else config.object("format")
    if form is not None:
        if form.get("type") != "json_schema":
            raise InvalidParameter(form.name("type"), form.get("type"), '"json_schema"')
        schema = read_object(form.get("schema"), form.name("schema"))
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema.as_dict()}}
    thinking = fields.object("thinking")
    if thinking is not None:
        chat |= _read_thinking(state, thinking, has_tools=bool(chat["tools"]))
    effort = None if config is None else config.text("effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise InvalidParameter("output_config.effort", effort, f"one of {', '.join(EFFORTS)}")
        # Unlike `reasoning_effort` of a chat, it turns thinking neither on nor off.
        chat["chat_template_kwargs"] = {"reasoning_effort": effort, **chat.get("chat_template_kwargs", {})}
    return chat


def _read_system(fields: Fields) -> list[dict[str, Any]]:
    system = fields.get("system")
    return [] if system is None else [{"role": "system", "content": read_text(system, "system", ("text",))}]


def _read_messages(fields: Fields) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat; a message with results of tools becomes several."""
    items = read_list(fields.get("messages"), "messages", "messages")
    for idx, value in enumerate(items):
        message = read_object(value, f"messages[{idx}]")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise InvalidParameter(message.name("role"), role, "user, assistant or system")
        content, wish = message.get("content"), {SANITIZE: message.get(SANITIZE)}
        if isinstance(content, str):
            yield {"role": role, "content": content, **wish}
        elif isinstance(content, list):
            for converted in _read_blocks(content, message.name("content"), role):
                yield {**converted, **wish}
        else:
            raise InvalidParameter(message.name("content"), content, "a string or a list of blocks")
    if role == "assistant":
        why = "an answer begins a new turn; use /v1/completions to continue a text"
        raise UnsupportedFeature(f"messages[{len(items) - 1}].role", f"the last message is the assistant's: {why}")


def _read_blocks(blocks: list[Any], name: str, role: str) -> Iterator[dict[str, Any]]:
    parts: list[str | ChatImage] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for idx, value in enumerate(blocks):
        block = read_object(value, f"{name}[{idx}]")
        block.refuse(NO_WISH)
        kind = required_text(block, "type")
        if kind == "text":
            parts.append(required_text(block, "text"))
        elif (image := _read_image(block)) is not None and role == "user":
            parts.append(image)
        elif kind == "tool_use" and role == "assistant":
            function = {"name": required_text(block, "name"), "arguments": _input(block)}
            calls.append({"id": required_text(block, "id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant":
            reasoning.append(required_text(block, "thinking"))
        elif kind == "tool_result" and role == "user":
            if parts:
                yield {"role": "user", "content": joined_content(parts)}
                parts = []
            content, result = block.get("content"), block.name("content")
            found = "" if content is None else read_content(content, result, ("text",), _read_image)
            yield {"role": "tool", "tool_call_id": required_text(block, "tool_use_id"), "content": found}
        elif kind in KNOWN_BLOCKS:
            why = f"blocks of type {shown(kind)} cannot be read in a message of the role {role}"
            raise UnsupportedFeature(block.name("type"), why)
        else:
            raise UnsupportedPart(block.name("type"), kind)
    if role == "assistant":
        yield {"role": role, "content": joined_content(parts), "tool_calls": calls} | (
            {"reasoning_content": "".join(reasoning)} if reasoning else {}
        )
    elif parts or not blocks:
        yield {"role": role, "content": joined_content(parts)}


def _read_image(block: Fields) -> ChatImage | None:
    """Return the image of a block; None for blocks of other types."""
    if block.get("type") != "image":
        return None
    source, part = block.object("source"), block.name("type")
    if source is None:
        raise InvalidParameter(block.name("source"), None, "an object")
    kind = source.get("type")
    if kind == "url":
        return url_image(source.get("url"), source.name("url"), part, "image")
    if kind == "file":
        raise UnsupportedFeature(source.name("type"), "the server stores no files; send the image in base64")
    if kind != "base64":
        raise InvalidParameter(source.name("type"), kind, '"base64" or "url"')
    if source.get("media_type") not in MEDIA_TYPES:
        raise InvalidParameter(source.name("media_type"), source.get("media_type"), f"one of {', '.join(MEDIA_TYPES)}")
    return base64_image(source.get("data"), source.name("data"), part, "image")


def _input(block: Fields) -> dict[str, Any]:
    return read_object(block.get("input"), block.name("input")).as_dict()


def _read_tools(items: object) -> object:
    """Return tools in a chat's form; a value that is no list is unchanged, for the chat's own reader to refuse."""
    if not isinstance(items, list):
        return items
    tools = []
    for idx, value in enumerate(items):
        tool = read_object(value, f"tools[{idx}]")
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise UnsupportedFeature(tool.name("type"), f"{shown(kind)} {NOT_KNOWN}")
        tools.append({"type": "function", "function": _read_function(tool)})
    return tools


def _read_function(tool: Fields) -> dict[str, Any]:
    schema = read_object(tool.get("input_schema"), tool.name("input_schema")).as_dict()
    return {name: tool.get(name) for name in ("name", "description", "strict")} | {"parameters": schema}


def _read_thinking(state: ServerState, thinking: Fields, *, has_tools: bool) -> dict[str, Any]:
    """Return the fields of a chat for `thinking`; a budget that the model cannot follow is dropped."""
    kind, display = thinking.get("type"), thinking.get("display")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidParameter("thinking.type", kind, '"enabled", "adaptive" or "disabled"')
    if display not in (None, "summarized", "omitted"):
        raise InvalidParameter("thinking.display", display, '"summarized" or "omitted"')
    budget = thinking.integer("budget_tokens", 0, 2**31 - 1)
    chat = thinking_switch(kind != "disabled") | {"include_reasoning": display != "omitted"}
    is_known = state.reasoning is not None and state.reasoning.tokens is not None
    is_in_calls = has_tools and state.tool_format is not None and bool(state.tool_format.answer_head)
    return chat | ({"thinking_token_budget": budget} if is_known and not is_in_calls and kind == "enabled" else {})


def _read_choice(fields: Fields) -> dict[str, Any]:
    choice = fields.object("tool_choice")
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind == "tool":
        chosen: object = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        chosen = CHOICES[kind]
    else:
        raise InvalidParameter("tool_choice.type", kind, '"auto", "any", "tool" or "none"')
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.flag("disable_parallel_tool_use")}


class MessageReply:
    """Turns outputs into messages and their events."""

    stream_format = FORMAT

    def __init__(self, answer_id: str, model: str, extras: ChatExtras) -> None:
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._parts = SampleParts(extras)
        self._has_begun = False
        # Index of the content block, -1 before the first; and its kind of pieces, or the index of its call.
        self._block = -1
        self._kind: object = None

    def chunks(self, prompt_idx: int, delta: RequestOutput, count: TokenCount) -> Iterator[dict[str, Any]]:  # noqa: ARG002
        """Yield the events of a delta."""
        if not self._has_begun:
            self._has_begun = True
            unknown: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**self._head, **unknown, "usage": _usage(count)}}
        for output in delta.outputs:
            for piece in self._parts.add(output, delta.prompt_token_ids):
                yield from self._piece(piece)
            if output.finished:
                yield from self._close()
                yield {"type": "message_delta", "delta": self._ending(output), "usage": _usage(count)}

    def last_chunks(self, count: TokenCount) -> Iterator[dict[str, Any]]:  # noqa: ARG002 - the delta had it
        """Yield the event that ends the stream."""
        yield {"type": "message_stop"}

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event that ends a stream with an error."""
        return error.anthropic_body()

    def whole(self, outputs: Sequence[RequestOutput], count: TokenCount) -> dict[str, Any]:
        """Return the answer in one piece; a call whose input was cut off is left out."""
        (sample,) = outputs[0].outputs
        content: list[dict[str, Any]] = []
        for piece in self._parts.add(sample, outputs[0].prompt_token_ids):
            if isinstance(piece, str):
                content.append({"type": "text", "text": piece})
            elif isinstance(piece, Reasoning):
                content.append({"type": "thinking", "thinking": piece.text, "signature": ""})
            elif (arguments := arguments_object(piece.arguments)) is not None:
                content.append(self._tool_use(piece) | {"input": arguments})
        return {**self._head, "content": content, **self._ending(sample), "usage": _usage(count)}

    def _piece(self, piece: Piece | Reasoning) -> Iterator[dict[str, Any]]:
        if isinstance(piece, CallDelta) and piece.name is not None and not piece.arguments:
            # The output ended before the call's arguments, which a block without deltas would show as {}.
            return
        kind = piece.index if isinstance(piece, CallDelta) else type(piece)
        if kind != self._kind:
            yield from self._close()
            self._block += 1
            self._kind = kind
            block: dict[str, Any] = {"type": "text", "text": ""}
            if isinstance(piece, Reasoning):
                block = {"type": "thinking", "thinking": "", "signature": ""}
            elif isinstance(piece, CallDelta):
                block = self._tool_use(piece)
            yield {"type": "content_block_start", "index": self._block, "content_block": block}
        if isinstance(piece, Reasoning):
            delta = {"type": "thinking_delta", "thinking": piece.text}
        elif isinstance(piece, CallDelta):
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
        else:
            delta = {"type": "text_delta", "text": piece}
        yield {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the open block, if there is one; a signature comes last in a block of thinking."""
        if self._kind is Reasoning:
            delta = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": self._block, "delta": delta}
        if self._block >= 0:
            yield {"type": "content_block_stop", "index": self._block}

    def _tool_use(self, piece: CallDelta) -> dict[str, Any]:
        call_id = self._parts.new_id(piece.name, piece.index)
        return {"type": "tool_use", "id": call_id, "name": piece.name, "input": {}}

    def _ending(self, output: CompletionOutput) -> dict[str, Any]:
        reason = self._parts.finish_reason(output)
        # A number is the id of a stop token.
        if reason == "stop" and isinstance(output.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
        return {"stop_reason": STOP_REASONS[reason or "stop"], "stop_sequence": None}


def _usage(count: TokenCount) -> dict[str, Any]:
    """Return the counts so far; `input_tokens` excludes cached tokens of the prompt."""
    return {
        "input_tokens": count.num_prompt - count.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": count.num_cached,
        "output_tokens": count.num_output,
        "output_tokens_details": {"thinking_tokens": count.num_reasoning},
    }
