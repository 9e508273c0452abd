"""The form in which a chat template reads the content of messages: a string, or a list of parts.

Templates of vision models, and some others, read parts: they silently drop a string. Some read parts for one role
only. The form is found by rendering a short conversation for each role, with a probe word in the content. Some
templates, such as DeepSeek's, write tool calls only if the content of their message is none; a probe finds this too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

STRING, PARTS, NONE, NOWHERE = "string", "parts", "none", "nowhere"
# Key for the content of messages with calls and without text, in addition to the roles.
CALLS: Final = "calls"
# In the order of the probes: probes of other roles include a user's message, in the form that was found for it.
ROLES: Final = ("user", "system", "assistant", "tool")
WORD: Final = "kqprobe"
# Some templates accept ids of nine characters only.
CALL: Final = {"id": "abcde1234", "type": "function", "function": {"name": WORD, "arguments": {}}}
PARAMETERS: Final = {"type": "object", "properties": {}}
TOOL: Final = {"type": "function", "function": {"name": "look", "description": "", "parameters": PARAMETERS}}

# Writes a conversation and a list of tools, or raises any exception.
Write = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]


def in_form(texts: Sequence[str], form: str) -> str | list[dict[str, str]] | None:
    """Return content in the form that a template reads."""
    if form == NONE:
        return None
    return [{"type": "text", "text": text} for text in texts] if form == PARTS else "".join(texts)


def texts_of(content: str | Sequence[Mapping[str, str]] | None) -> list[str]:
    """Return the texts of content in either form."""
    if content is None or isinstance(content, str):
        return [content or ""]
    return [part["text"] for part in content if part["type"] == "text"]


def find_forms(write: Write) -> dict[str, str]:
    """Return the form of each role and of `CALLS`: the first of string and parts that the template writes.

    A role whose content the template writes in no form has `NOWHERE`; a role that it refuses has `STRING`.
    """
    forms = dict.fromkeys(ROLES, STRING)
    for role in ROLES:
        tried = ((form, _conversations(role, {**forms, role: form})) for form in (STRING, PARTS))
        forms[role] = _first_written(tried, write) or STRING
    beside = STRING if forms["assistant"] == NOWHERE else forms["assistant"]
    call, user = {"role": "assistant", "tool_calls": [CALL]}, _message("user", "x", forms)
    call_form = _first_written(
        ((form, [[user, {**call, "content": in_form([], form)}]]) for form in (beside, NONE)), write
    )
    return {**forms, CALLS: call_form if call_form in (beside, NONE) else beside}


def _first_written(tried: Iterable[tuple[str, Iterable[list[dict[str, Any]]]]], write: Write) -> str | None:
    """Return the first form whose probe word is written; `NOWHERE` if none is, None if all are refused."""
    is_accepted = False
    for form, conversations in tried:
        for messages, tools in product(conversations, (None, [TOOL])):
            try:
                text = write(messages, tools)
            except (MemoryError, RecursionError):
                raise
            except Exception:  # a template can raise any exception
                continue
            is_accepted = True
            if WORD in text.casefold():
                return form
    return NOWHERE if is_accepted else None


def _conversations(role: str, forms: Mapping[str, str]) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with the probe word in the content of one role."""
    user, word = _message("user", "x", forms), _message(role, WORD, forms)
    match role:
        case "user":
            yield [word]
        case "system":
            yield [word, user]
        case "assistant":
            yield [user, word, user]
            yield [user, word]
        case _:
            named = {**CALL, "function": {"name": "look", "arguments": {}}}
            call = {"role": "assistant", "content": in_form([], forms["assistant"]), "tool_calls": [named]}
            result = {**word, "name": "look", "tool_call_id": CALL["id"]}
            yield [user, call, result]
            yield [user, call, result, _message("assistant", "x", forms)]


def _message(role: str, text: str, forms: Mapping[str, str]) -> dict[str, Any]:
    return {"role": role, "content": in_form([text], forms[role])}
