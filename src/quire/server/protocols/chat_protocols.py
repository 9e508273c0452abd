"""Parts of the adapters of other protocols: a chat in this server's own form, and a sample split into its parts.

An adapter converts a request to the form that `chat_completions.read_chat` reads, the form of messages and tools in the
whole engine, so all limits and constraints of chats apply to it; and it renames fields in errors to its protocol's
names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.engine.outputs.outputs import CompletionOutput
from quire.errors import InvalidParameter, UnsupportedPart
from quire.platform.bounded.json_text import BadJSON, parse
from quire.server.generation.generation import GenerationRequest, Reply, run
from quire.server.generation.reasoning import ReasoningSplitter
from quire.server.generation.tool_use import read_tool_use
from quire.server.protocols.chat_completions import ChatExtras, read_chat, render_chat
from quire.server.requests.field_names import renaming
from quire.server.requests.fields import Fields, Refusal
from quire.server.state.state import ServerState
from quire.text.chat.images import ChatImage
from quire.text.chat.messages import MAX_MESSAGES, SANITIZE
from quire.text.tool_calls import SampleCalls
from quire.text.tool_calls.calls import Piece, merge

# Parts of a message, and items that become parts, cannot have the field `SANITIZE`.
NO_WISH: Mapping[str, Refusal] = {SANITIZE: ((), "it is a field of whole messages")}
# Quire's own options, which every protocol takes.
OWN_OPTIONS = ("cache_salt", "priority", "retain_cache")


async def answer_chat(
    state: ServerState,
    request: Request,
    chat: Mapping[str, Any],
    make_reply: Callable[[ChatExtras], Reply],
    answer_id: str,
    rename: Callable[[str], str],
    read: Callable[[ServerState, Fields], tuple[GenerationRequest, ChatExtras]] = read_chat,
) -> ASGIApp:
    """Run a chat of another protocol and return its response."""
    with renaming(rename):
        job, extras = read(state, Fields(chat))
        return await run(state, request, job, make_reply(extras), answer_id)


async def count_chat(state: ServerState, chat: Mapping[str, Any], rename: Callable[[str], str]) -> int:
    """Return the number of tokens of the prompt of a chat of another protocol."""
    with renaming(rename):
        fields = Fields(chat)
        use = read_tool_use(state, fields)
        prompt = await render_chat(state, fields, () if use is None else use.definitions)
        return len(await state.llm.texts.encode(prompt, add_special_tokens=False))


def thinking_switch(is_on: bool | None) -> dict[str, Any]:
    """Return the field of a chat that switches thinking; a template without a switch does not use it."""
    return {} if is_on is None else {"chat_template_kwargs": {"enable_thinking": is_on}}


class Reasoning(NamedTuple):
    """A piece of a model's reasoning.

    Args:
        text: the new text.
    """

    text: str


class SampleParts:
    """Splits the output of a chat's one sample into reasoning, content and calls, in the order of the output."""

    def __init__(self, extras: ChatExtras) -> None:
        self._calls = None if extras.tool_use is None else SampleCalls(extras.tool_use)
        self._splitter = ReasoningSplitter(extras.reasoning)
        self._shows_reasoning = extras.reasoning is not None and bool(extras.reasoning.names)

    def add(self, output: CompletionOutput, prompt_ids: Sequence[int]) -> list[Piece | Reasoning]:
        """Return the pieces that a delta of the output, or the whole output, completes."""
        reasoning, text = self._splitter.add(output.index, prompt_ids, output.text, is_finished=output.finished)
        pieces: list[Piece | Reasoning] = [Reasoning(reasoning)] if reasoning and self._shows_reasoning else []
        if self._calls is None:
            return [*pieces, text] if text else pieces
        return [*pieces, *merge(self._calls.pieces(text, is_finished=output.finished))]

    def new_id(self, name: str | None, index: int) -> str:
        """Return an id for the call with an index, in a form that the model's template accepts."""
        assert self._calls is not None
        return self._calls.new_id(name or "", index)

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """Return "tool_calls" for "stop" after a complete call, even of a named function; else the engine's reason."""
        is_call = self._calls is not None and self._calls.has_whole_calls
        return "tool_calls" if output.finish_reason == "stop" and is_call else output.finish_reason


def read_list(value: object, name: str, what: str) -> list[Any]:
    """Return a field that is a list of a chat's messages or items."""
    if not isinstance(value, list):
        raise InvalidParameter(name, value, f"a list of {what}")
    if not 0 < len(value) <= MAX_MESSAGES:
        raise InvalidParameter(name, f"{len(value)} {what}", f"from 1 to {MAX_MESSAGES} {what}")
    return value


def read_object(value: object, name: str) -> Fields:
    """Return an object with typed access."""
    if not isinstance(value, dict):
        raise InvalidParameter(name, value, "an object")
    return Fields(value, f"{name}.")


def required_text(fields: Fields, field: str) -> str:
    """Return a string that must be there."""
    value = fields.text(field)
    if value is None:
        raise InvalidParameter(fields.name(field), None, "a string")
    return value


def read_text(value: object, name: str, kinds: tuple[str, ...]) -> str:
    """Return text that is a string or a list of text parts."""
    content = read_content(value, name, kinds, None)
    assert isinstance(content, str)
    return content


def read_content(
    value: object, name: str, kinds: tuple[str, ...], as_image: Callable[[Fields], ChatImage | None] | None
) -> str | list[dict[str, Any] | ChatImage]:
    """Return the content of a message of a chat: its text, or a list of parts if it has an image.

    Args:
        value: a string or a list of parts.
        name: name of the value.
        kinds: types of text parts.
        as_image: function that returns the image of a part, None for other parts; None where there are no images.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidParameter(name, value, "a string or a list of text parts")
    parts: list[str | ChatImage] = []
    for idx, part in enumerate(value):
        fields = read_object(part, f"{name}[{idx}]")
        fields.refuse(NO_WISH)
        kind = required_text(fields, "type")
        image = None if as_image is None else as_image(fields)
        if image is not None:
            parts.append(image)
        elif kind in kinds:
            parts.append(required_text(fields, "text"))
        else:
            raise UnsupportedPart(fields.name("type"), kind)
    return joined_content(parts)


def joined_content(parts: Sequence[str | ChatImage]) -> str | list[dict[str, Any] | ChatImage]:
    """Return the content of a message of a chat: its text, or a list of parts if it has an image."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def arguments_object(arguments: str) -> dict[str, Any] | None:
    """Return the arguments of a call as an object; None if they are no JSON object."""
    try:
        value = parse(arguments.encode())
        json.dumps(value, allow_nan=False)
    except (BadJSON, ValueError):
        return None
    return value if isinstance(value, dict) else None
