"""Structured outputs: constraints by a JSON schema, a regular expression, choices or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from quire.errors import InvalidParameter, UnsupportedFeature

# Separator in a rule of a Lark grammar: the rule after it is used if the rule before it does not compile, "" for none;
# a terminal with it must have a text. Neither JSON texts nor terminals contain a plain tab.
OR_ELSE = "\t// or else "
MAX_GRAMMAR_CHARS = 2**17
MAX_CHOICES = 4096
KINDS = ("json", "json_object", "regex", "choice", "grammar")
# Fields that only JSON may have.
FLAGS = ("disable_any_whitespace", "disable_additional_properties")
UNSUPPORTED: Mapping[str, str] = {
    "structural_tag": "write a Lark grammar",
    "whitespace_pattern": "set disable_any_whitespace, or write a grammar",
}


class GrammarSource(NamedTuple):
    """Source of a grammar, which identifies it.

    Args:
        kind: "json" (a schema), "regex", "choice" (a JSON list of strings) or "grammar" (Lark or GBNF).
        text: text of the grammar.
        has_whitespace: True if JSON may have whitespace between its parts.
        is_closed: True if objects have no other properties than the schema declares, unless it asks for them.
    """

    kind: str
    text: str
    has_whitespace: bool = True
    is_closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Constraint of an output's form. Exactly one of the first five fields is given.

    Args:
        json: JSON schema, as text, as a mapping, or True for any JSON; stored as text.
        json_object: True for any JSON object.
        regex: regular expression that matches the whole output, in the syntax of Rust's `regex`: without lookaround and
            backreferences.
        choice: allowed outputs.
        grammar: grammar in the Lark dialect of `llguidance`, whose rule `start` matches the output, or in GBNF
            (llama.cpp's form of EBNF), whose rule `root` does.
        disable_any_whitespace: no whitespace between the parts of JSON; else one space, or a new line with indentation.
        disable_additional_properties: objects have no other properties than the schema declares, unless it asks for
            them with `additionalProperties`, `patternProperties` or `unevaluatedProperties`.
        disable_fallback: vLLM's field, without effect: there is nothing to fall back to.
        whitespace_pattern, structural_tag: vLLM's fields, which are not supported; None is allowed.

    Raises:
        InvalidParameter: a value is not allowed; the message names the field, the value and the allowed values.
        UnsupportedFeature: one of the last two fields is set.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("json_object", *FLAGS, "disable_fallback"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"structured_outputs.{name}", getattr(self, name), "true or false")
        for name, why in UNSUPPORTED.items():
            if getattr(self, name) is not None:
                raise UnsupportedFeature(f"structured_outputs.{name}", why)
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            raise InvalidParameter("structured_outputs", kinds, f"exactly one of {', '.join(KINDS)}")
        for name in FLAGS:
            if getattr(self, name) and kinds[0] not in ("json", "json_object"):
                raise InvalidParameter(f"structured_outputs.{name}", True, f"false with {kinds[0]}")
        if self.json is not None:
            put(self, "json", _schema(self.json))
        if self.choice is not None:
            put(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))

    @property
    def source(self) -> GrammarSource:
        """Source of the grammar."""
        if self.json_object:
            return GrammarSource("json", '{"type": "object"}', not self.disable_any_whitespace)
        if self.json is not None:
            assert isinstance(self.json, str)
            return GrammarSource("json", self.json, not self.disable_any_whitespace, self.disable_additional_properties)
        if self.choice is not None:
            return GrammarSource("choice", json.dumps(self.choice, ensure_ascii=False))
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        return GrammarSource("grammar", self.grammar or "")

    @property
    def field(self) -> str:
        """Name of the field that is set, for error messages."""
        kind = next(name for name in KINDS if getattr(self, name) not in (None, False))
        return f"structured_outputs.{kind}"


# vLLM's name of the class.
StructuredOutputsParams = StructuredOutputs


def structured_outputs(value: object) -> StructuredOutputs:
    """Return structured outputs from an instance or from a mapping of its fields."""
    if isinstance(value, StructuredOutputs):
        return value
    names = [item.name for item in fields(StructuredOutputs)]
    if not isinstance(value, Mapping):
        raise InvalidParameter("structured_outputs", value, f"StructuredOutputs, or a mapping of {', '.join(names)}")
    for name in value:
        if name not in names:
            raise InvalidParameter("structured_outputs", name, f"a mapping of {', '.join(names)}")
    return StructuredOutputs(**{name: item for name, item in value.items() if item is not None})


def _schema(value: object) -> str:
    """Return a JSON schema as text; the order of its properties is kept, since the output follows it."""
    allowed = f"a JSON schema (an object, its text, or true) of at most {MAX_GRAMMAR_CHARS} characters"
    name = "structured_outputs.json"
    if value is True:
        return "true"
    if isinstance(value, str):
        _check_text("json", value)
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(name, value, f"{allowed} ({error})") from error
        if not isinstance(parsed, dict | bool):
            raise InvalidParameter(name, value, allowed)
        return value
    if not isinstance(value, Mapping):
        raise InvalidParameter(name, value, allowed)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(name, "a mapping", f"{allowed} ({error})") from error
    _check_text("json", text)
    return text


def _choices(value: object) -> tuple[str, ...]:
    allowed = f"a list of 1 to {MAX_CHOICES} non-empty strings, {MAX_GRAMMAR_CHARS} characters together"
    name = "structured_outputs.choice"
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_CHOICES:
        raise InvalidParameter(name, value, allowed)
    for choice in value:
        if not isinstance(choice, str) or not choice or not _is_unicode(choice):
            raise InvalidParameter(name, choice, allowed)
    if sum(map(len, value)) > MAX_GRAMMAR_CHARS:
        raise InvalidParameter(name, f"{sum(map(len, value))} characters", allowed)
    return tuple(value)


def _check_text(name: str, value: object) -> None:
    allowed = f"a non-empty string of at most {MAX_GRAMMAR_CHARS} characters"
    if not isinstance(value, str) or not value or not _is_unicode(value):
        raise InvalidParameter(f"structured_outputs.{name}", value, allowed)
    if len(value) > MAX_GRAMMAR_CHARS:
        raise InvalidParameter(f"structured_outputs.{name}", f"{len(value)} characters", allowed)


def lark_literal(text: str) -> str:
    """Return the terminal of a literal text in llguidance's dialect of Lark."""
    # JSON escapes all control characters except this one, and Lark's strings cannot contain any.
    return json.dumps(text).replace("\x7f", "\\u007f")


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
