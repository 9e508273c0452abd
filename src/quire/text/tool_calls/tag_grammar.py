"""Grammars of arguments between tags, whose strings have no quotes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.text.schemas.forms import Array, Boolean, Form, Null, Number, Object, State, Text
from quire.text.schemas.patterns import quoted
from quire.text.tool_calls.argument_schema import forms_of, objects_of, types_of
from quire.text.tool_calls.calls import Function
from quire.text.tool_calls.grammar import joined, literal, written
from quire.text.tool_calls.markup import BOTH_WORDS, JSON_VALUES, TaggedArguments
from quire.text.tool_calls.value_grammar import BARE_KEY, ValueRules, repeated

KEY_SYNTAX = replace(JSON_VALUES, bare_key=BARE_KEY)
# Name of a type -> regular expression of the texts that are read as its values, without white space around them.
INTEGER = "-?(0|[1-9][0-9]*)"
EXPONENT = r"[eE][+\-]?[0-9]+"
SPELLINGS: Mapping[str, str] = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": INTEGER,
    "number": rf"{INTEGER}(\.[0-9]+({EXPONENT})?|{EXPONENT})",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}


def tagged_arguments(
    form: TaggedArguments, function: Function, prefix: str, tokens: Mapping[str, int]
) -> tuple[ValueRules, list[str]]:
    """Return the rules of a function's values, and the expression of its arguments for each form of its schema.

    Arguments come in the order of the schema, then others if it allows them.
    """
    rules = TagRules(form, ValueRules.of(function, form.values, prefix, tokens))
    return rules.values, [rules.arguments(one) for one in objects_of(rules.values.schema)]


@dataclass(frozen=True, slots=True)
class TagRules:
    """The rules of one function's arguments between tags."""

    form: TaggedArguments
    values: ValueRules

    def arguments(self, schema_form: Object) -> str:
        """Return the expression of all arguments."""
        schema, parts = self.values.schema, []
        for key, state in schema_form.properties:
            if schema.forms(state):
                head = self._fixed(f"{self.form.key_begin}{key}")
                value = self._valued(state, types_of(schema, key))
                parts.append(f"({head} {value}){'' if key in schema_form.required else '?'}")
        if schema.forms(schema_form.additional):
            name = self.values.other_key(KEY_SYNTAX, [key for key, _ in schema_form.properties])
            value = self._valued(schema_form.additional, types_of(schema, None))
            part = joined(self._fixed(self.form.key_begin), name, value)
            parts.append(repeated(part, schema_form.min_others, schema_form.max_others))
        return " ".join(parts) or literal("")

    def _fixed(self, text: str) -> str:
        return written(text, self.values.tokens)

    def _valued(self, state: State, read: Collection[str]) -> str:
        """Return the expression of an argument after its key."""
        forms = forms_of(self.values.schema, state)
        key_end, end = self._fixed(self.form.key_end), self._fixed(self.form.value_end)
        texts = [form for form in forms if isinstance(form, Text)]
        others = [form for form in forms if not isinstance(form, Text)]
        if not self.form.json_key_end:
            value = self._mixed(forms, texts, read, end) if texts else f"({self._options(forms)}) {end}"
            return joined(key_end, value)
        options = [joined(key_end, self._ended(self.values.text(texts)))] if texts else []
        if others:
            options.append(f"{self._fixed(self.form.json_key_end)} ({self.values.options(others)}) {end}")
        return f"({' | '.join(options)})"

    def _mixed(self, forms: Sequence[Form], texts: Sequence[Text], read: Collection[str], end: str) -> str:
        """Return the expression of a value that may be a string, and of its end."""
        # The lexer takes the longest terminal, so values that may begin alike share one terminal: strings and, as far
        # as they have an expression, words and numbers. Strings that would be read as other values are excluded.
        apart = [form for form in forms if isinstance(form, Array | Object) or _is_limited(form)]
        options = [f"({self._options(apart)}) {end}"] if apart else []
        free = {kind for form in forms if form not in apart for kind in _free_types(form)}
        spellings = [SPELLINGS[kind] for kind in sorted(SPELLINGS.keys() & set(read) - free)]
        spellings += ["-?[0-9](?s:.*)"] if any(map(_is_limited, apart)) else []
        excluded = f"[ \\t\\n\\r]*({'|'.join(spellings)})[ \\t\\n\\r]*" if spellings else ""
        others = "|".join(filter(None, (_written(form) for form in forms if form not in apart)))
        return f"({' | '.join([*options, self._ended(self.values.text(texts, excluded, others))])})"

    def _options(self, forms: Sequence[Form]) -> str:
        """Return the expression of a value that is no string."""
        words = [word for form in forms for one in _constants(form) for word in BOTH_WORDS[one][1:]]
        return " | ".join([self.values.options(forms), *map(literal, words)])

    def _ended(self, text: str) -> str:
        """Return the expression of a text up to the first end of a value."""
        mark = self.form.value_end.rstrip()
        ended = self.values.rule(f"{text} {literal(mark)}", option="[lazy]")
        after = literal(self.form.value_end.removeprefix(mark)) if mark != self.form.value_end else ""
        if mark not in self.values.tokens:
            return joined(ended, after)
        return joined(f"({ended} | {text} {self._fixed(mark)})", after)


def _is_limited(form: Form) -> bool:
    """Return whether a form is a number with limits, which have no regular expression."""
    return isinstance(form, Number) and form.constants is None and replace(form, is_integer=False) != Number()


def _free_types(form: Form) -> Collection[str]:
    """Return the names of the types whose values all match a form."""
    if isinstance(form, Number):
        return () if form.constants is not None else ("integer",) if form.is_integer else ("integer", "number")
    if isinstance(form, Boolean):
        return ("boolean",) if len(form.values) > 1 else ()
    return ("null",) if isinstance(form, Null) else ()


def _written(form: Form) -> str:
    """Return the regular expression of the values of a form without limits; "" for strings."""
    if isinstance(form, Number) and form.constants is not None:
        return "|".join(quoted(json.dumps(value)) for value in form.constants)
    if isinstance(form, Number):
        return INTEGER if form.is_integer else rf"{INTEGER}(\.[0-9]+)?({EXPONENT})?"
    return "|".join(word for one in _constants(form) for word in BOTH_WORDS[one])


def _constants(form: Form) -> Sequence[str]:
    """Return JSON's words for the values of a form."""
    if isinstance(form, Boolean):
        return [json.dumps(value) for value in form.values]
    return ["null"] if isinstance(form, Null) else ()
