"""The grammar of outputs with calls in any `Markup`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from quire.text.schemas.patterns import quoted
from quire.text.tool_calls.argument_schema import objects_of
from quire.text.tool_calls.calls import NAME
from quire.text.tool_calls.grammar import CallRules, arguments, free_text, joined, literal, whole, written
from quire.text.tool_calls.markup import CallObject, JsonArguments, KeywordArguments, Markup, parts_of
from quire.text.tool_calls.tag_grammar import tagged_arguments
from quire.text.tool_calls.value_grammar import ValueRules

SPACE = r"[ \t\n\r]*"


def markup_grammar(markup: Markup, rules: CallRules) -> str:
    """Return the grammar of outputs in which every call is well formed: text with blocks of calls, or blocks only."""
    fixed = partial(written, tokens=rules.tokens)
    heads, tails, lines = _calls(markup, rules)
    is_list = markup.between is not None
    more = f"({joined(fixed(markup.between or ''), 'call')})*" if is_list and rules.is_parallel else ""
    block = joined(fixed(markup.open), "call", more, fixed(markup.close))
    lines = [
        f"body: {joined(block, fixed(markup.end))}",
        f"call: {' | '.join(map(joined, heads, tails))}",
        *lines,
    ]
    # One block contains all calls of a list.
    may_repeat = rules.is_parallel and not is_list
    if rules.is_required and markup.may_be_bare:
        return whole([f"start: {block}", *lines[1:]])
    if rules.is_required:
        begin = fixed(markup.begin)
        next_block = f"{fixed(markup.next_block)}?" if markup.next_block else ""
        repeated = f"({joined(next_block, begin, 'body')})*" if may_repeat else ""
        return whole([f"start: {joined(begin, 'body', repeated)}", *lines])
    if markup.may_be_bare:
        return whole([*_bare_or_marked(markup, rules, tails), *lines])
    start = "start: (opened body)* free" if may_repeat else "start: free | opened body"
    return whole([start, *free_text(rules, markup.begin), *lines])


def _calls(markup: Markup, rules: CallRules) -> tuple[list[str], list[str], list[str]]:
    """Return expressions of each function's call, up to its arguments and from there on, and their rules."""
    form = markup.arguments
    heads: list[str] = []
    tails: list[str] = []
    lines: list[str] = []
    fixed = partial(written, tokens=rules.tokens)
    id_text = f'/"{markup.id_pattern}"/'
    call_id = joined(fixed(markup.id_begin), f"/{markup.id_pattern}/") if markup.id_begin else ""
    for idx, function in enumerate(rules.functions):
        if isinstance(form, CallObject):
            # Lexemes are tokens of JSON. The lexer takes the longest one, so longer ones would exclude other objects.
            named = (*_key(form.name_key), literal(f'"{function.name}"'), literal(", "), *_key(form.arguments_key))
            first = (*_key(form.first_key), id_text, literal(", ")) if form.first_key else ()
            last = f"({joined(literal(', '), *_key(form.last_key), id_text)})?" if form.last_key else ""
            heads.append(joined(literal("{"), *first, *named))
            tails.append(joined(f"args_{idx}", last, literal("}")))
            continue
        server = joined(fixed(markup.server_begin), f"/{NAME}/") if markup.server_begin else ""
        before, name_end = joined(server, fixed(markup.call_begin + function.name)), fixed(markup.name_end)
        heads.append(joined(before, f"({call_id})?" if call_id else "", name_end))
        if isinstance(form, JsonArguments):
            tails.append(joined(f"args_{idx}", fixed(markup.call_end)))
            continue
        tails.append(f"f{idx}_args")
        if isinstance(form, KeywordArguments):
            values = ValueRules.of(function, form.values, f"f{idx}_", rules.tokens)
            options = [values.members(one, form.keys) for one in objects_of(values.schema)]
        else:
            values, options = tagged_arguments(form, function, f"f{idx}_", rules.tokens)
        lines += [f"f{idx}_args: ({' | '.join(options)}) {fixed(markup.call_end)}", *values.lines]
    if isinstance(form, CallObject | JsonArguments):
        lines = arguments(rules)
    return heads, tails, lines


def _bare_or_marked(markup: Markup, rules: CallRules, tails: Iterable[str]) -> list[str]:
    """Return the rules of text that does not begin like a call, of calls from the beginning, and of calls after a mark.

    Text never begins like a call, so that every text that is read as a call is constrained as one; if contents have a
    beginning of their own, it has that. It contains no added tokens, since these end a turn or are reserved in the
    vocabularies of models with such calls.
    """
    form = markup.arguments
    lines: list[str] = []
    first: list[str] = []
    others: list[str] = []
    for idx, (function, tail) in enumerate(zip(rules.functions, tails, strict=True)):
        head = _begun(markup, function.name)
        if isinstance(form, CallObject):
            head += f'{SPACE},{SPACE}"{form.arguments_key}"{SPACE}:{SPACE}'
        lines += [f"FIRST_{idx}: /{_spaced(markup.open)}{head}/", f"OTHER_{idx}: /{head}/"]
        first.append(f"FIRST_{idx} {tail}")
        others.append(f"OTHER_{idx} {tail}")
    separator = literal((markup.between or "").strip())
    more = f"({separator} ({' | '.join(others)}))*" if rules.is_parallel else ""
    begun = f"({' | '.join(first)})"
    names = "|".join(function.name for function in rules.functions)
    text = f"/{quoted(markup.content_begin)}(?s:.*)/ & ~/{_spaced(markup.open)}{_begun(markup, f'({names})')}(?s:.*)/"
    return [
        "start: free | bare | opened body",
        f"bare: {joined(begun, more, written(markup.close, rules.tokens))}",
        *lines,
        *free_text(replace(rules, text_tokens=()), markup.begin, text),
    ]


def _key(key: str) -> tuple[str, str]:
    """Return the lexemes of a key and the text after it."""
    return literal(f'"{key}"'), literal(": ")


def _begun(markup: Markup, name: str) -> str:
    """Return the regular expression of a call's beginning, up to where its function is certain."""
    if isinstance(markup.arguments, CallObject):
        kind = f'("type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
        return f'{SPACE}\\{{{SPACE}{kind}"{markup.arguments.name_key}"{SPACE}:{SPACE}"{name}"'
    return f"{_spaced(markup.call_begin)}{SPACE}{name}{_spaced(markup.name_end)}"


def _spaced(text: str) -> str:
    """Return the regular expression of a fixed text as readers take it, with any white space before its parts."""
    if text and not parts_of(text):
        return f"{SPACE}[ \\t\\n\\r]"
    return "".join(f"{SPACE}{re.escape(part)}" for part in parts_of(text))
