"""Calls as a model of a format writes them, from the fixed texts of its `Markup`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.text.tool_calls.formats import FORMATS, MarkupFormat
from quire.text.tool_calls.markup import CallObject, JsonArguments, KeywordArguments, Markup, TaggedArguments
from quire.text.tool_calls.value_grammar import ValueSyntax

Calls = Sequence[tuple[str, dict[str, Any]]]
# Every markup as the first one of its format, by the name of the format and its number there.
MARKUPS = {
    f"{form.name}-{idx}": form.led_by(markup)
    for form in FORMATS.values()
    if isinstance(form, MarkupFormat)
    for idx, markup in enumerate(form.markups)
}


def write(markup: Markup, calls: Calls) -> str:
    """Return calls, in one block or in a block for each, without other text."""
    written = [_call(markup, idx, name, given) for idx, (name, given) in enumerate(calls)]
    groups = [[one] for one in written] if markup.between is None else [written]
    blocks = (
        f"{markup.begin}{markup.open}{(markup.between or '').join(group)}{markup.close}{markup.end}" for group in groups
    )
    return markup.next_block.join(blocks)


def _call(markup: Markup, idx: int, name: str, given: dict[str, Any]) -> str:
    form = markup.arguments
    call_id = f"{idx}" if markup.id_pattern == "[0-9]+" else f"abcdefgh{idx}"
    if isinstance(form, CallObject):
        members = {form.first_key: call_id, form.name_key: name, form.arguments_key: given, form.last_key: call_id}
        return json.dumps({key: value for key, value in members.items() if key}, ensure_ascii=False)
    server = f"{markup.server_begin}tools" if markup.server_begin else ""
    head = f"{server}{markup.call_begin}{name}{markup.id_begin}{call_id if markup.id_begin else ''}{markup.name_end}"
    if isinstance(form, JsonArguments):
        text = json.dumps(given, ensure_ascii=False)
    elif isinstance(form, TaggedArguments):
        text = "".join(_tagged(form, key, value) for key, value in given.items())
    else:
        text = _members(form.keys, form, given)
    return f"{head}{text}{markup.call_end}"


def _tagged(form: TaggedArguments, key: str, value: Any) -> str:
    key_end = form.key_end if isinstance(value, str) or not form.json_key_end else form.json_key_end
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{form.key_begin}{key}{key_end}{text}{form.value_end}"


def _members(syntax: ValueSyntax, form: KeywordArguments, given: dict[str, Any]) -> str:
    items = sorted(given.items(), key=lambda item: item[0].lower()) if syntax.is_sorted else given.items()
    bare = syntax.bare_key
    return syntax.comma.join(
        f"{key if bare else json.dumps(key, ensure_ascii=False)}{syntax.colon}{_value(form, value)}"
        for key, value in items
    )


def _value(form: KeywordArguments, value: Any) -> str:
    syntax = form.values
    if isinstance(value, dict):
        return f"{{{_members(syntax, form, value)}}}"
    if isinstance(value, list):
        return f"[{syntax.comma.join(_value(form, item) for item in value)}]"
    if isinstance(value, str) and syntax.quote:
        return f"{syntax.quote}{value}{syntax.quote}"
    text = json.dumps(value, ensure_ascii=False)
    return syntax.words[text][-1] if text in syntax.words else text
