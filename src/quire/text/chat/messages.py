"""Validation of conversations, and their conversion to the form that templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from quire.errors import InvalidParameter, UnsupportedFeature, UnsupportedPart
from quire.text.chat.content_forms import CALLS, STRING, in_form, texts_of
from quire.text.chat.images import IMAGE, IMAGE_URL, TEMPLATE_PART, ChatImage, read_image

ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles whose messages may have images.
IMAGE_ROLES: Final = ("user", "tool")
MAX_MESSAGES = 4096
MAX_INPUT_CHARS = 1 << 23
# Maximum length of the arguments of one call: parsing them as JSON holds the interpreter's lock.
MAX_ARGUMENTS_CHARS = 1 << 18
# The field of a message that decides whether its texts may not become control tokens.
SANITIZE: Final = "sanitize_control_tokens"

Message = Mapping[str, Any]
ALL_STRINGS: Final[Mapping[str, str]] = MappingProxyType({})


class TemplateConversation(NamedTuple):
    """A conversation in the form that templates read.

    Args:
        messages: its messages; see `normalise_messages`.
        images: its images, in order.
    """

    messages: list[dict[str, Any]]
    images: tuple[ChatImage, ...]


def normalise_messages(messages: Sequence[Message], forms: Mapping[str, str] = ALL_STRINGS) -> list[dict[str, Any]]:
    """Validate a conversation without images and convert it to the form that templates read.

    Content becomes one string (a list of text parts is joined, an absent one is "") or a list of parts, the role
    `developer` becomes `system`, and the arguments of tool calls become objects. Fields that templates do not read are
    left out.
    """
    return read_conversation(messages, forms, 0).messages


def read_conversation(messages: Sequence[Message], forms: Mapping[str, str], max_images: int) -> TemplateConversation:
    """Validate a conversation and convert it to the form that templates read; see `normalise_messages`.

    Content with an image is a list of parts, in which images have no data.

    Args:
        messages: the conversation.
        forms: the form of content by role; see `content_forms`.
        max_images: maximum number of images; 0 for a model that reads none.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", messages, "a list of messages")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidParameter("messages", f"{len(messages)} messages", f"from 1 to {MAX_MESSAGES} messages")
    images: list[ChatImage] = []
    given = images if max_images else None
    normal = [_normalise(message, f"messages[{idx}]", forms, given) for idx, message in enumerate(messages)]
    if len(images) > max_images:
        allowed = f"one of at most {max_images} images (limit_mm_per_prompt)"
        raise InvalidParameter(images[max_images].name, f"{len(images)} images", allowed)
    num_chars = sum(
        sum(map(len, texts_of(message["content"]))) + len(message.get("reasoning", "")) for message in normal
    )
    if num_chars > MAX_INPUT_CHARS:
        raise InvalidParameter("messages", f"{num_chars} characters", f"at most {MAX_INPUT_CHARS} characters")
    return TemplateConversation(normal, tuple(images))


def _normalise(message: object, where: str, forms: Mapping[str, str], images: list[ChatImage] | None) -> dict[str, Any]:
    """Return a message in the form that templates read; add its images to `images`, with None refuse them."""
    if not isinstance(message, Mapping):
        raise InvalidParameter(where, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidParameter(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise UnsupportedFeature(f"{where}.{name}", "use content and tool_calls")
    calls = message.get("tool_calls") or None
    if calls is not None and role != "assistant":
        raise InvalidParameter(f"{where}.tool_calls", calls, "absent unless the role is assistant")
    role = "system" if role == "developer" else role
    reads_images = images is not None
    parts = _parts(message.get("content"), f"{where}.content", reads_images, may_be_absent=calls is not None)
    texts = [part for part in parts if isinstance(part, str)]
    has_calls_only = calls is not None and not any(texts)
    content = in_form([] if has_calls_only else texts, forms.get(CALLS if has_calls_only else role, STRING))
    own_images = [part for part in parts if isinstance(part, ChatImage)]
    if images is not None and own_images:
        if role not in IMAGE_ROLES:
            why = f"messages of the role {role} have no images, only those of {' and '.join(IMAGE_ROLES)} have"
            raise UnsupportedFeature(own_images[0].part, why)
        content = [
            dict(TEMPLATE_PART) if isinstance(part, ChatImage) else {"type": "text", "text": part} for part in parts
        ]
        images += own_images
    normal: dict[str, Any] = {"role": role, "content": content}
    if calls is not None:
        normal["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise InvalidParameter(f"{where}.{name}", value, "a string")
            normal[name] = value
    reasoning = normal.get("reasoning", normal.get("reasoning_content"))
    if reasoning is not None:
        # Templates read one of them.
        normal |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls is None or not normal["content"]:
            # gpt-oss' template, which refuses a message with calls and both texts.
            normal["thinking"] = reasoning
    return normal


def _parts(content: object, where: str, reads_images: bool, *, may_be_absent: bool) -> list[str | ChatImage]:
    """Return the texts and images of content."""
    if isinstance(content, str):
        return [content]
    if content is None and may_be_absent:
        return []
    if not isinstance(content, list | tuple):
        raise InvalidParameter(where, content, "a string or a list of parts")
    parts: list[str | ChatImage] = []
    for idx, part in enumerate(content):
        if isinstance(part, ChatImage):
            if not reads_images:
                raise UnsupportedPart(part.part, part.kind)
            parts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            raise InvalidParameter(f"{where}[{idx}]", part, 'an object like {"type": "text", "text": "..."}')
        if kind in (IMAGE, IMAGE_URL) and reads_images:
            parts.append(read_image(part, f"{where}[{idx}]"))
            continue
        if kind != "text":
            raise UnsupportedPart(f"{where}[{idx}].type", kind)
        if part.get(SANITIZE) is not None:
            raise UnsupportedFeature(f"{where}[{idx}].{SANITIZE}", "it is a field of whole messages")
        if not isinstance(part.get("text"), str):
            raise InvalidParameter(f"{where}[{idx}].text", part.get("text"), "a string")
        parts.append(part["text"])
    return parts


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidParameter(where, calls, "a list of tool calls")
    normal = []
    for idx, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidParameter(f"{where}[{idx}]", call, "an object with a function and its name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            if len(arguments) > MAX_ARGUMENTS_CHARS:
                allowed = f"at most {MAX_ARGUMENTS_CHARS} characters long"
                raise InvalidParameter(f"{where}[{idx}].function.arguments", f"{len(arguments)} characters", allowed)
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, Mapping):
            raise InvalidParameter(f"{where}[{idx}].function.arguments", function["arguments"], "a JSON object")
        named = {"name": function["name"], "arguments": dict(arguments)}
        normal.append({"id": call.get("id"), "type": "function", "function": named})
    return normal
