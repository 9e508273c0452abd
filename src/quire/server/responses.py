"""`POST /v1/responses`: OpenAI's Responses, without state: a request has its whole conversation."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature, shown
from quire.server import sse
from quire.server.chat_completions import ChatExtras
from quire.server.chat_protocols import (
    OWN_OPTIONS,
    Reasoning,
    SampleParts,
    answer_chat,
    read_list,
    read_object,
    read_text,
    required_text,
    thinking_switch,
)
from quire.server.errors import REQUEST_ID, ApiError
from quire.server.fields import Fields, Refusal
from quire.server.models import read_fields
from quire.server.sampling import LABEL_FIELDS, NEVER_IGNORED
from quire.server.served_model import model_name
from quire.server.state import ServerState
from quire.server.usage import TokenCount

NOT_STORED = "the server stores no responses; send the whole conversation as input"
SAME_FIELDS = ("temperature", "top_p", "stream", "parallel_tool_calls", *LABEL_FIELDS, *OWN_OPTIONS)
UNSUPPORTED: Mapping[str, Refusal] = {
    **NEVER_IGNORED,
    "previous_response_id": ((), NOT_STORED),
    "conversation": ((), NOT_STORED),
    "prompt": ((), "the server stores no prompts; send instructions and input"),
    "background": ((False,), "the server stores no responses; stream the response"),
    "context_management": (([],), "the conversation is used as it is"),
    "top_logprobs": ((0,), "use /v1/chat/completions for log probabilities"),
    "truncation": (("disabled",), "the conversation is used whole or refused"),
    "service_tier": (("auto", "default"), "there is one tier"),
}
# Values of `include` without effect: items of reasoning have no encrypted content here.
INCLUDABLE = ("reasoning.encrypted_content",)
KNOWN_FIELDS = (
    *SAME_FIELDS,
    *UNSUPPORTED,
    *("model", "input", "instructions", "tools", "tool_choice", "text", "reasoning", "max_output_tokens"),
    *("store", "metadata", "include", "stream_options", "max_tool_calls"),
)
TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")
MESSAGE = re.compile(r"^messages\[\d+\](\.tool_calls\[\d+\])?")
# Patterns of a chat's fields, and the protocol's names in place of them.
NAMES: Sequence[tuple[str, str]] = (
    (r"^messages$", "input"),
    (r"^max_tokens$", "max_output_tokens"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^tool_choice\.allowed_tools", "tool_choice"),
    (r"\.function\b", ""),
)


async def responses(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /v1/responses`."""
    fields = await read_fields(state, request, UNSUPPORTED, KNOWN_FIELDS)
    reader = InputReader()
    chat = read_chat_fields(state, fields, reader)
    answer_id = f"resp_{request.scope[REQUEST_ID]}"
    make_reply = partial(ResponseReply, response_head(fields, answer_id, model_name(state, request)))
    return await answer_chat(state, request, chat, make_reply, answer_id, reader.rename)


class InputReader:
    """Converts instructions and input to the messages of a chat."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        # The item of the input by the name of the message, or of the call, that it became.
        self._items: dict[str, str] = {}
        self._reasoning = ""

    def rename(self, field: str) -> str:
        """Return the protocol's name of a field of the chat."""
        field = MESSAGE.sub(lambda match: self._items.get(match[0], match[0]), field)
        for pattern, name in NAMES:
            field = re.sub(pattern, name, field, count=1)
        return field

    def read(self, fields: Fields) -> None:
        """Read `instructions` and `input`.

        Raises:
            RequestError: naming the item and the field.
        """
        instructions = fields.text("instructions")
        if instructions is not None:
            self._add({"role": "system", "content": instructions}, "instructions")
        given = fields.get("input")
        if isinstance(given, str):
            self._add({"role": "user", "content": given}, "input")
            return
        for idx, value in enumerate(read_list(given, "input", "items")):
            self._read_item(read_object(value, f"input[{idx}]"), f"input[{idx}]")

    def _read_item(self, item: Fields, name: str) -> None:
        kind = "message" if item.get("type") is None else required_text(item, "type")
        if kind == "message":
            role = item.get("role")
            if role not in ROLES:
                raise InvalidParameter(item.name("role"), role, f"one of {', '.join(ROLES)}")
            self._add({"role": role, "content": read_text(item.get("content"), item.name("content"), TEXT_PARTS)}, name)
        elif kind == "function_call":
            function = {"name": required_text(item, "name"), "arguments": required_text(item, "arguments")}
            self._add_call({"id": required_text(item, "call_id"), "type": "function", "function": function}, name)
        elif kind == "function_call_output":
            output = read_text(item.get("output"), item.name("output"), TEXT_PARTS)
            self._add({"role": "tool", "tool_call_id": required_text(item, "call_id"), "content": output}, name)
        elif kind == "reasoning":
            content = item.get("content")
            self._reasoning += "" if content is None else read_text(content, item.name("content"), ("reasoning_text",))
        elif kind == "item_reference":
            raise UnsupportedFeature(item.name("type"), NOT_STORED)
        else:
            raise UnsupportedFeature(item.name("type"), f"items of type {shown(kind)} cannot be read")

    def _add(self, message: dict[str, Any], name: str) -> None:
        if self._reasoning and message["role"] == "assistant":
            message["reasoning_content"] = self._reasoning
        self._reasoning = ""
        self._items[f"messages[{len(self.messages)}]"] = name
        self.messages.append(message)

    def _add_call(self, call: dict[str, Any], name: str) -> None:
        """Add a call to the assistant's message before it, or else to a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""}, name)
        calls = self.messages[-1].setdefault("tool_calls", [])
        self._items[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = name
        calls.append(call)


def read_chat_fields(state: ServerState, fields: Fields, reader: InputReader) -> dict[str, Any]:
    """Convert a request to the fields of a chat.

    Raises:
        RequestError: naming the field.
    """
    reader.read(fields)
    chat = {name: fields.get(name) for name in SAME_FIELDS}
    chat |= {"messages": reader.messages, "max_tokens": fields.get("max_output_tokens")}
    chat |= {"tools": _read_tools(fields.get("tools")), "tool_choice": _read_choice(fields.get("tool_choice"))}
    fields.flag("store")
    for name in ("metadata", "stream_options"):
        fields.object(name)
    include = fields.get("include")
    if include is not None and (not isinstance(include, list) or any(one not in INCLUDABLE for one in include)):
        raise InvalidParameter("include", include, f"a list of nothing but {', '.join(INCLUDABLE)}")
    text = fields.object("text")
    form = None if text is None else text.object("format")
    if form is not None:
        given = form.as_dict()
        kind = given.pop("type", None)
        chat["response_format"] = {"type": kind} | ({"json_schema": given} if kind == "json_schema" else {})
        if kind == "json_schema":
            read_object(form.get("schema"), form.name("schema"))
    reasoning = fields.object("reasoning")
    effort = None if reasoning is None else reasoning.text("effort")
    if effort is not None:
        chat |= thinking_switch(state, effort != "none")
    return chat


def _read_tools(given: object) -> object:
    """Return tools in a chat's form; what is malformed stays, for the chat's own reader to refuse."""
    if not isinstance(given, list):
        return given
    tools = []
    for idx, value in enumerate(given):
        tool = read_object(value, f"tools[{idx}]")
        kind = tool.get("type")
        if kind != "function":
            raise UnsupportedFeature(tool.name("type"), f"{shown(kind)} is no tool of this server, only function is")
        tools.append(_nested(tool.as_dict()))
    return tools


def _read_choice(choice: object) -> object:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return _nested(choice)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        if isinstance(listed, list):
            listed = [_nested(one) if isinstance(one, dict) else one for one in listed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}
    return choice


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function whose fields are in an object of their own, as in chats."""
    return {"type": flat.get("type"), "function": {key: value for key, value in flat.items() if key != "type"}}


def response_head(fields: Fields, answer_id: str, model: str) -> dict[str, Any]:
    """Return the fields of a response that are known before its output.

    Raises:
        InvalidParameter: a field that the response repeats has a number that JSON cannot write.
    """
    echoed = ("instructions", "max_output_tokens", "reasoning", "temperature", "top_p", "user", "text")
    for name in (*echoed, "metadata", "tools", "tool_choice"):
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
        **{name: fields.get(name) for name in echoed},
    }


class ResponseReply:
    """Turns outputs into a response and its events.

    Args:
        head: fields of the response that are known before its output.
        extras: contents of the answer.
    """

    stream_format = sse.NAMED_EVENTS

    def __init__(self, head: Mapping[str, Any], extras: ChatExtras) -> None:
        self._head = dict(head)
        self._parts = SampleParts(extras)
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        # The text of the open item, the last one; the index of its call, None in a message; and whether it is whole.
        self._text: list[str] = []
        self._call: int | None = None
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
            if isinstance(piece, Reasoning):  # counted in the usage; OpenAI's own responses do not show it either
                continue
            call = None if isinstance(piece, str) else piece.index
            if not self._items or call != self._call:
                yield from self._close("completed")
                self._call = call
                yield from self._open(None if isinstance(piece, str) else piece.name)
            text = piece if isinstance(piece, str) else piece.arguments
            self._text.append(text)
            self._is_whole = isinstance(piece, str) or piece.is_last
            yield self._part_event("delta", delta=text)
        if output.finished:
            self._finish_reason = output.finish_reason
            is_cut = not self._is_whole or (self._call is None and output.finish_reason == "length")
            yield from self._close("incomplete" if is_cut else "completed")

    def _open(self, function: str | None) -> Iterator[dict[str, Any]]:
        """Begin an item: a call of a function, or a message."""
        self._text = []
        item: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "content": [],
        }
        if function is not None:
            call = {"call_id": self._parts.new_id(), "name": function, "arguments": ""}
            item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", **call}
        self._items.append(item | {"status": "in_progress"})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        if function is None:
            yield self._part_event("added", "response.content_part", part=_output_text(""))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the open item, if there is one."""
        if not self._items:
            return
        text, item = "".join(self._text), {**self._items[-1], "status": status}
        if self._call is None:
            yield self._part_event("done", text=text)
            yield self._part_event("done", "response.content_part", part=_output_text(text))
            item["content"] = [_output_text(text)]
        else:
            yield self._part_event("done", name=item["name"], arguments=text)
            item["arguments"] = text
        self._items[-1] = item
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_event(self, what: str, kind: str | None = None, **fields: Any) -> dict[str, Any]:
        """Return an event of the open item's text, or of a kind that is given."""
        where: dict[str, Any] = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        if self._call is None:
            where["content_index"] = 0
            where |= {"logprobs": []} if kind is None else {}
        own = "response.output_text" if self._call is None else "response.function_call_arguments"
        return self._event(f"{kind or own}.{what}", **where, **fields)


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(count: TokenCount) -> dict[str, Any]:
    return {
        "input_tokens": count.num_prompt,
        "input_tokens_details": {"cached_tokens": count.num_cached, "cache_write_tokens": 0},
        "output_tokens": count.num_output,
        "output_tokens_details": {"reasoning_tokens": count.num_reasoning},
        "total_tokens": count.num_prompt + count.num_output,
    }
