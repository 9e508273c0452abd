"""Pieces of the grammars that hold a model to a format; Lark, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from quire.text.tokenizer import Tokenizer
from quire.text.tool_calls.calls import Function

ANNOTATIONS = frozenset({"$schema", "$comment", "title", "description", "default", "examples", "deprecated"})
MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# What holds a schema, or a list of them.
SCHEMAS = frozenset({"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "not", "propertyNames"})
# Values are written as models see them in their prompts, where `json.dumps` wrote them; free white space would give a
# weak model a way never to come to an end.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What calls there may be.

    Args:
        functions: those that may be called, at least one.
        is_required: the output is calls and nothing else; otherwise there may be text before them, or no call.
        is_parallel: there may be more than one call.
        tokens: the ids of markers that are tokens of their own.
        text_tokens: ids of other tokens that a grammar does not count as text, and that free text may have; see
            `text_tokens`.
    """

    functions: Sequence[Function]
    is_required: bool = False
    is_parallel: bool = True
    tokens: Mapping[str, int] = field(default_factory=dict)
    text_tokens: Sequence[int] = ()


def whole(lines: Iterable[str]) -> str:
    """Return a grammar of these rules."""
    return "\n".join(["%llguidance {}", *lines, ""])


def literal(text: str) -> str:
    """Return a text that is to stand there as it is."""
    return json.dumps(text)


def marker(text: str, tokens: Mapping[str, int]) -> str:
    """Return a marker: its token where it has one, since no other token may write it then."""
    return f"<[{tokens[text]}]>" if text in tokens else literal(text)


def object_calls(rules: CallRules, key: str) -> list[str]:
    """Return the rules of `object`: a JSON object with a name and, under a key, arguments that fit the schema."""
    heads = (literal(f'{{"name": "{function.name}", "{key}": ') for function in rules.functions)
    options = (f'{head} args_{idx} "}}"' for idx, head in enumerate(heads))
    return [f"object: {' | '.join(options)}", *arguments(rules)]


def arguments(rules: CallRules) -> list[str]:
    """Return the rules `args_0`, `args_1`, ...: the arguments of each function."""
    return [f"args_{idx}: %json {_schema(function)}" for idx, function in enumerate(rules.functions)]


def free_text(rules: CallRules, mark: str, text: str = r"/(?s:.*)/") -> list[str]:
    """Return the rules of `free`, text without the marker, and of `opened`, text that ends with it.

    Once the marker is there, written out or as its token, it cannot be text any more. Readers see text without some of
    the tokens in it, so none of these may stand inside a marker: behind a part of one there are none.

    Args:
        rules: what calls there may be.
        mark: the marker.
        text: the terminal of text.
    """
    lines = [f"TEXT: {text}", f"written[lazy]: TEXT {literal(mark)}"]
    endings = ["written"]
    if mark in rules.tokens:
        endings.append(f"TEXT <[{rules.tokens[mark]}]>")
    parts = ""
    if others := sorted(set(rules.text_tokens) - set(rules.tokens.values())):
        begun = "|".join(re.escape(mark[:length]) for length in range(1, len(mark)))
        lines.append(f"BESIDE: {text} & ~/(?s:.*)({begun})/")
        lines.append(f"part: BESIDE <[{','.join(_ranges(others))}]>")
        parts = "part* "
    return [*lines, f"free: {parts}TEXT", f"opened: {parts}({' | '.join(endings)})"]


def text_tokens(tokenizer: Tokenizer, marker: str, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that are no text to a grammar and may come in the middle of one, like those round a thought.

    llguidance takes added tokens for text but where they are special, or in angle brackets. Left out are those whose
    own letters could be a part of a marker, where they are shown.

    Args:
        tokenizer: of the model.
        marker: of the format.
        vocab_size: ids lie below.
    """
    ids = {
        token_id
        for text, token_id in tokenizer.added_ids.items()
        if token_id in tokenizer.special_ids or (text.startswith("<") and text.endswith(">"))
        if not _overlaps(text, marker) and token_id < vocab_size
    }
    return tuple(sorted(ids - {tokenizer.eos_token_id}))


def _overlaps(text: str, marker: str) -> bool:
    """Tell whether a text that holds this one may have a marker of which this one has a part."""
    cuts = range(1, len(marker))
    is_part = any(text.endswith(marker[:cut]) or text.startswith(marker[cut:]) for cut in cuts)
    return is_part or marker in text or text in marker


def _ranges(ids: Sequence[int]) -> Iterator[str]:
    """Yield ascending ids as ranges."""
    begins = [ids[0], *(after for before, after in pairwise(ids) if after != before + 1)]
    ends = [*(before for before, after in pairwise(ids) if after != before + 1), ids[-1]]
    for begin, end in zip(begins, ends, strict=True):
        yield str(begin) if begin == end else f"{begin}-{end}"


def _schema(function: Function) -> str:
    # The type says that arguments are an object, where the schema does not; the layout is ours, whatever it says.
    schema = {"type": "object", **bare_schema(function.parameters)}
    return json.dumps({**schema, "x-guidance": {**LAYOUT, "lenient": not function.is_strict}}, ensure_ascii=False)


def bare_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without what only people and prompts read: descriptions may be longer than all the rest."""
    bare: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ANNOTATIONS:
            continue
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            bare[key] = {name: _bare(inner) for name, inner in value.items()}
        elif key in SCHEMAS:
            bare[key] = _bare(value)
        else:
            bare[key] = value
    return bare


def _bare(value: object) -> object:
    if isinstance(value, dict):
        return bare_schema(value)
    return [_bare(inner) for inner in value] if isinstance(value, list) else value
