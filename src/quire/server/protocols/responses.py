"""`POST /v1/responses`: OpenAI's Responses, without state: a request has its whole conversation."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature, shown
from quire.server.admission.usage import TokenCount
from quire.server.generation.generation import json_response
from quire.server.generation.sampling import LABELS, NEVER_IGNORED, UNSUPPORTED
from quire.server.generation.served_model import model_name
from quire.server.http import sse
from quire.server.protocols.chat_completions import ChatExtras
from quire.server.protocols.chat_protocols import (
    NO_WISH,
    OWN_OPTIONS,
    Reasoning,
    SampleParts,
    answer_chat,
    count_chat,
    read_content,
    read_list,
    read_object,
    read_text,
    required_text,
)
from quire.server.protocols.models import read_fields
from quire.server.protocols.response_tools import (
    ResponseTools,
    custom_arguments,
    custom_input,
    flat_name,
)
from quire.server.requests.errors import REQUEST_ID, ApiError
from quire.server.requests.fields import Fields, RouteFields, warn_once
from quire.server.state.state import ServerState
from quire.text.chat.images import ChatImage, reads_small, url_image
from quire.text.chat.messages import SANITIZE
from quire.text.tool_calls import CallDelta
from quire.text.tool_calls.calls import Piece

NOT_STORED = "the server stores no responses; send the whole conversation as input"
# Fields with the same meaning in a chat; the last five are labels, whose types the chat checks.
SAME_FIELDS = (
    *("temperature", "top_p", "stream", "parallel_tool_calls", *OWN_OPTIONS),
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
)
# Values of `include` without effect: items of reasoning have no encrypted content here.
INCLUDABLE = ("reasoning.encrypted_content",)
FIELDS: Final = RouteFields(
    honoured=(
        *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls"),
        *("text", "text.format", "reasoning", "reasoning.effort", "max_output_tokens"),
        *("temperature", "top_p", "stream", "stream_options", "include", "metadata", "max_tool_calls", *OWN_OPTIONS),
    ),
    refused={
        **NEVER_IGNORED,
        "previous_response_id": ((), NOT_STORED),
        "conversation": ((), NOT_STORED),
        "prompt": ((), "the server stores no prompts; send instructions and input"),
        "background": ((False,), "the server stores no responses; stream the response"),
        "context_management": (([],), "the conversation is used as it is"),
        "top_logprobs": ((0,), "use /v1/chat/completions for log probabilities"),
        "truncation": (("disabled",), "the conversation is used whole or refused"),
        "service_tier": (("auto", "default"), "there is one tier"),
        "moderation": UNSUPPORTED["moderation"],
        "access_programs": (({},), "there are no such programs"),
        "reasoning.context": (("auto",), "the model's chat template decides which reasoning it shows"),
        "reasoning.mode": (("standard",), "there is one mode; use reasoning.effort"),
    },
    neutral={
        **{
            name: why
            for name, why in LABELS.items()
            if name not in ("metadata", "service_tier", "verbosity", "prediction")
        },
        "text.verbosity": LABELS["verbosity"],
        "reasoning.summary": "the reasoning itself is in the content of its item",
        "reasoning.generate_summary": "the reasoning itself is in the content of its item",
        "stream_options.include_obfuscation": "streams have no padding",
        "background_options": "background is refused",
        "image": "images are parts of the input",
        "client_metadata": LABELS["metadata"],
        "personality": "no model here was trained on it; instructions can ask for it",
    },
    objects=("text", "reasoning", "stream_options"),
)
# Fields that a response repeats unchanged.
REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "reasoning", "temperature", "top_p", "user", "text"),
)
TEXT_PARTS = ("input_text", "output_text", "text")
IMAGE_PART: Final = "input_image"
REASONING_PARTS = ("reasoning_text", "summary_text")
ROLES = ("user", "assistant", "system", "developer")
# The events of the text of an item, by its type.
TEXT_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
# Records of tools that OpenAI's servers ran, without what these found.
RECORDS = ("web_search_call", "file_search_call", "image_generation_call")
CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
# Beginnings of the ids of items.
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
MESSAGE = re.compile(r"^messages\[\d+\](\.tool_calls\[\d+\])?")
# Patterns of a chat's fields -> the protocol's names.
NAMES: Sequence[tuple[str, str]] = (
    (r"^messages$", "input"),
    (r"^max_tokens$", "max_output_tokens"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^tool_choice\.allowed_tools", "tool_choice"),
    (r"\.function\b", ""),
)


async def responses(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /v1/responses`."""
    fields = await read_fields(state, request, FIELDS)
    reader = ResponsesReader(fields)
    answer_id = f"resp_{request.scope[REQUEST_ID]}"
    head = response_head(fields, answer_id, model_name(state, request))
    make_reply = partial(ResponseReply, head, reader.tools)
    return await answer_chat(state, request, reader.chat, make_reply, answer_id, reader.rename)


async def input_tokens(state: ServerState, request: Request) -> Response:
    """Answer `POST /v1/responses/input_tokens`: the length of the prompt, as `usage` would have it."""
    fields = await read_fields(state, request, FIELDS)
    reader = ResponsesReader(fields)
    num_tokens = await count_chat(state, reader.chat, reader.rename)
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


class ResponsesReader:
    """Converts a request to the fields of a chat.

    Attributes:
        tools: its tools.
        chat: the fields of the chat.
    """

    def __init__(self, fields: Fields) -> None:
        self._messages: list[dict[str, Any]] = []
        # The item of the input by the name of the message, or of the call, that it became.
        self._items: dict[str, str] = {}
        self._reasoning = ""
        self._read_input(fields)
        self.tools = ResponseTools(fields.get("tools"), fields.get("tool_choice"))
        tools = {"tools": self.tools.functions, "tool_choice": self.tools.choice}
        self.chat = read_options(fields) | {"messages": self._messages, **tools}

    def rename(self, field: str) -> str:
        """Return the protocol's name of a field of the chat."""
        field = self.tools.rename(MESSAGE.sub(lambda match: self._items.get(match[0], match[0]), field))
        for pattern, name in NAMES:
            field = re.sub(pattern, name, field, count=1)
        return field

    def _read_input(self, fields: Fields) -> None:
        """Read `instructions` and `input`."""
        instructions = fields.text("instructions")
        if instructions is not None:
            self._add({"role": "system", "content": instructions}, "instructions")
        items = fields.get("input")
        if isinstance(items, str):
            self._add({"role": "user", "content": items}, "input")
            return
        if not isinstance(items, list):
            raise InvalidParameter("input", items, "a string or a list of items")
        for idx, value in enumerate(read_list(items, "input", "items")):
            self._read_item(read_object(value, f"input[{idx}]"), f"input[{idx}]")

    def _read_item(self, item: Fields, name: str) -> None:
        kind = "message" if item.get("type") is None else required_text(item, "type")
        if kind == "message":
            role = item.get("role")
            if role not in ROLES:
                raise InvalidParameter(item.name("role"), role, f"one of {', '.join(ROLES)}")
            content = read_content(item.get("content"), item.name("content"), TEXT_PARTS, _read_image)
            self._add({"role": role, "content": content, SANITIZE: item.get(SANITIZE)}, name)
        elif kind == "function_call":
            item.refuse(NO_WISH)
            self._add_call(item, required_text(item, "arguments"), name)
        elif kind == "custom_tool_call":
            item.refuse(NO_WISH)
            self._add_call(item, custom_arguments(required_text(item, "input")), name)
        elif kind in CALL_OUTPUTS:
            output = read_content(item.get("output"), item.name("output"), TEXT_PARTS, _read_image)
            result = {"role": "tool", "tool_call_id": required_text(item, "call_id"), "content": output}
            self._add({**result, SANITIZE: item.get(SANITIZE)}, name)
        elif kind == "reasoning":
            item.refuse(NO_WISH)
            # A client that does not know the content sends the summary only.
            name = "summary" if item.get("content") is None else "content"
            self._reasoning += read_text(item.get(name) or "", item.name(name), REASONING_PARTS)
        elif kind == "item_reference":
            raise UnsupportedFeature(item.name("type"), NOT_STORED)
        elif kind in RECORDS:
            warn_once(f"item {kind}", "left out items of type %r: such tools run on OpenAI's servers", kind)
        else:
            raise UnsupportedFeature(item.name("type"), f"items of type {shown(kind)} cannot be read")

    def _add(self, message: dict[str, Any], name: str) -> None:
        if message["role"] == "assistant":
            self._add_reasoning(message)
        self._reasoning = ""
        self._items[f"messages[{len(self._messages)}]"] = name
        self._messages.append(message)

    def _add_reasoning(self, message: dict[str, Any]) -> None:
        """Add the reasoning before an item to the assistant's message that the item belongs to."""
        if self._reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + self._reasoning
        self._reasoning = ""

    def _add_call(self, item: Fields, arguments: str, name: str) -> None:
        """Add a call to the assistant's message before it, or else to a new one."""
        called = flat_name(required_text(item, "name"), item.text("namespace"))
        function = {"name": called, "arguments": arguments}
        call = {"id": required_text(item, "call_id"), "type": "function", "function": function}
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""}, name)
        self._add_reasoning(self._messages[-1])
        calls = self._messages[-1].setdefault("tool_calls", [])
        self._items[f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]"] = name
        calls.append(call)


def _read_image(part: Fields) -> ChatImage | None:
    """Return the image of a part; None for parts of other types."""
    kind = part.get("type")
    if kind != IMAGE_PART:
        return None
    if part.get("file_id") is not None:
        raise UnsupportedFeature(part.name("file_id"), "the server stores no files; send image_url")
    is_small = reads_small(part.get("detail"), part.name("detail"))
    return url_image(part.get("image_url"), part.name("image_url"), part.name("type"), kind, is_small=is_small)


def read_options(fields: Fields) -> dict[str, Any]:
    """Return the fields of a chat beside messages and tools."""
    chat = {name: fields.get(name) for name in SAME_FIELDS}
    chat["max_tokens"] = fields.get("max_output_tokens")
    fields.flag("store")
    for name in ("metadata", "stream_options"):
        fields.object(name)
    fields.integer("max_tool_calls", 1, 2**31 - 1)  # a limit on tools that a server runs, and this one runs none
    include = fields.get("include")
    if include is not None and (not isinstance(include, list) or any(one not in INCLUDABLE for one in include)):
        raise InvalidParameter("include", include, f"a list of nothing but {', '.join(INCLUDABLE)}")
    text = fields.object("text")
    form = None if text is None else text.object("format")
    if form is not None:
        schema = form.as_dict()
        kind = schema.pop("type", None)
        chat["response_format"] = {"type": kind} | ({"json_schema": schema} if kind == "json_schema" else {})
        if kind == "json_schema":
            read_object(form.get("schema"), form.name("schema"))
    reasoning = fields.object("reasoning")
    chat["reasoning_effort"] = None if reasoning is None else reasoning.get("effort")
    return chat


def response_head(fields: Fields, answer_id: str, model: str) -> dict[str, Any]:
    """Return the fields of a response that are known before its output."""
    for name in (*REPEATED, "metadata", "tools", "tool_choice"):
        try:
            json.dumps(fields.get(name), allow_nan=False)
        except ValueError as error:
            raise InvalidParameter(name, fields.get(name), "without numbers that a double cannot hold") from error
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "metadata": fields.get("metadata") or {},
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "tools": fields.get("tools") or [],
        "tool_choice": fields.get("tool_choice") or "auto",
        **{name: fields.get(name) for name in REPEATED},
    }


class ResponseReply:
    """Turns outputs into a response and its events."""

    stream_format = sse.NAMED_EVENTS

    def __init__(self, head: Mapping[str, Any], tools: ResponseTools, extras: ChatExtras) -> None:
        self._head = dict(head)
        self._tools = tools
        self._parts = SampleParts(extras)
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        # The text of the open item, the last one; the kind of its pieces, or the index of its call; and whether it is
        # whole.
        self._text: list[str] = []
        self._key: object = None
        self._is_whole = True
        self._finish_reason: str | None = None

    def chunks(self, prompt_idx: int, delta: RequestOutput, count: TokenCount) -> Iterator[dict[str, Any]]:  # noqa: ARG002
        """Yield the events of a delta."""
        if not self._num_events:
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._response("in_progress", None))
        for output in delta.outputs:
            yield from self._add(output, delta.prompt_token_ids)

    def last_chunks(self, count: TokenCount) -> Iterator[dict[str, Any]]:
        """Yield the event of the whole response."""
        response = self.body(count)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event that ends a stream with an error."""
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def whole(self, outputs: Sequence[RequestOutput], count: TokenCount) -> dict[str, Any]:
        """Return the answer in one piece."""
        for _ in self._add(outputs[0].outputs[0], outputs[0].prompt_token_ids):
            pass
        return self.body(count)

    def body(self, count: TokenCount) -> dict[str, Any]:
        """Return the response of a finished output."""
        return self._response("incomplete" if self._finish_reason == "length" else "completed", count)

    def _response(self, status: str, count: TokenCount | None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = None if count is None else _usage(count)
        return {**self._head, "status": status, "incomplete_details": reason, "output": self._items, "usage": usage}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _add(self, output: CompletionOutput, prompt_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
        for piece in self._parts.add(output, prompt_ids):
            key = piece.index if isinstance(piece, CallDelta) else type(piece)
            if key != self._key:
                yield from self._close("completed")
                self._key = key
                yield from self._open(piece)
            text = piece if isinstance(piece, str) else piece[0] if isinstance(piece, Reasoning) else piece.arguments
            self._text.append(text)
            self._is_whole = not isinstance(piece, CallDelta) or piece.is_last
            # The input of a custom tool is a string of JSON, which is known when it is whole.
            if self._items[-1]["type"] != "custom_tool_call":
                yield self._part_event("delta", delta=text)
        if output.finished:
            self._finish_reason = output.finish_reason
            is_cut = not self._is_whole or (not isinstance(self._key, int) and output.finish_reason == "length")
            yield from self._close("incomplete" if is_cut else "completed")

    def _open(self, piece: Piece | Reasoning) -> Iterator[dict[str, Any]]:
        """Begin an item: a call of a function, a message, or reasoning."""
        self._text = []
        item: dict[str, Any]
        if isinstance(piece, CallDelta):
            item = self._tools.called(piece.name or "").item(self._parts.new_id(piece.name, piece.index))
        elif isinstance(piece, Reasoning):
            item = {"type": "reasoning", "summary": [], "content": []}
        else:
            item = {"type": "message", "role": "assistant", "content": []}
        item_id = f"{ID_PREFIXES[item['type']]}_{secrets.token_hex(12)}"
        self._items.append({"id": item_id, **item, "status": "in_progress"})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        if "content" in item:
            yield self._part_event("added", "response.content_part", part=_part(item["type"], ""))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the open item, if there is one."""
        if not self._items:
            return
        text, item = "".join(self._text), {**self._items[-1], "status": status}
        if "content" in item:
            yield self._part_event("done", text=text)
            yield self._part_event("done", "response.content_part", part=_part(item["type"], text))
            item["content"] = [_part(item["type"], text)]
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(text)
            if item["input"]:
                yield self._part_event("delta", delta=item["input"])
            yield self._part_event("done", input=item["input"])
        else:
            yield self._part_event("done", name=item["name"], arguments=text)
            item["arguments"] = text
        self._items[-1] = item
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_event(self, what: str, kind: str | None = None, **fields: Any) -> dict[str, Any]:
        """Return an event of the open item's text, or of a kind that is given."""
        item = self._items[-1]
        where: dict[str, Any] = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if "content" in item:
            where["content_index"] = 0
        if kind is None and item["type"] == "message":
            where["logprobs"] = []
        return self._event(f"{kind or TEXT_EVENTS[item['type']]}.{what}", **where, **fields)


def _part(kind: str, text: str) -> dict[str, Any]:
    """Return the content of a message, or of an item of reasoning."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(count: TokenCount) -> dict[str, Any]:
    return {
        "input_tokens": count.num_prompt,
        "input_tokens_details": {"cached_tokens": count.num_cached, "cache_write_tokens": 0},
        "output_tokens": count.num_output,
        "output_tokens_details": {"reasoning_tokens": count.num_reasoning},
        "total_tokens": count.num_prompt + count.num_output,
    }
