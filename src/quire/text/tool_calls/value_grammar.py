"""Grammars of values in formats other than JSON, from schemas in normal form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.sequences.structured import OR_ELSE
from quire.text.schemas.as_json import number_schema, text_schema
from quire.text.schemas.forms import Array, Boolean, Form, NormalSchema, Number, Object, State, Text
from quire.text.schemas.patterns import quoted
from quire.text.schemas.states import Abilities
from quire.text.tool_calls.argument_schema import argument_schema, forms_of
from quire.text.tool_calls.calls import Function
from quire.text.tool_calls.grammar import literal

# Features of schemas that these grammars support.
ABILITIES = Abilities(has_name_patterns=False)
# A JSON string with short escapes only, so that each key has one spelling.
QUOTED_KEY = r'"([^"\\\x00-\x1f]|\\["\\nrtbf])*"'
APOSTROPHE = "'"
# Characters of a key without quotes: letters and digits of any script. The range is written out, since the classes \w
# of Python's regular expressions and of the grammars' differ.
KEY_CHARS = r"a-zA-Z0-9_.\u00a1-\U0010ffff-"
BARE_KEY = f"[{KEY_CHARS}]{{1,64}}"
# A string of Python without escapes.
SINGLE_QUOTED = r"'[^'\\]*'"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSyntax:
    """The spelling of values.

    Args:
        words: spellings of true, false and null.
        comma: separator of members and of items.
        colon: separator of a key and a value.
        bare_key: regular expression of the keys that are written without quotes; "" to quote all keys.
        quote: marker before and after a string without escapes; "" for JSON strings.
        has_single_quotes: True if strings and keys without escapes may be between single quotes.
        is_sorted: True if keys are in alphabetical order.
    """

    words: Mapping[str, tuple[str, ...]]
    comma: str
    colon: str
    bare_key: str = ""
    quote: str = ""
    has_single_quotes: bool = False
    is_sorted: bool = False


@dataclass(slots=True)
class ValueRules:
    """The rules of one function's values.

    Args:
        schema: schema of the function's arguments.
        is_strict: False if a terminal that does not compile may be replaced by a terminal of any text or number.
        syntax: spelling of values.
        prefix: beginning of the rules' names.
        tokens: token ids of the markers that are single tokens.
    """

    schema: NormalSchema
    is_strict: bool
    syntax: ValueSyntax
    prefix: str
    tokens: Mapping[str, int]
    lines: list[str] = field(default_factory=list)
    _names: dict[tuple[Form, ...], str] = field(default_factory=dict)
    # By option and body.
    _rules: dict[str, str] = field(default_factory=dict)
    _num_names: int = 0

    @classmethod
    def of(cls, function: Function, syntax: ValueSyntax, prefix: str, tokens: Mapping[str, int]) -> ValueRules:
        """Return an empty set of rules for a function, with the parts of its schema that these grammars can enforce."""
        return cls(argument_schema(function, ABILITIES), function.is_strict, syntax, prefix, tokens)

    def new_name(self, letter: str) -> str:
        """Return a name that no other rule has."""
        self._num_names += 1
        return f"{self.prefix}{letter}{self._num_names}"

    def value(self, state: State) -> str:
        """Return the name of the rule for a value; the state must have forms."""
        forms = forms_of(self.schema, state)
        if forms not in self._names:
            self._names[forms] = name = self.new_name("v")
            self.lines.append(f"{name}: {self.options(forms)}")
        return self._names[forms]

    def options(self, forms: Iterable[Form]) -> str:
        """Return the rule expression of a value with any of the forms."""
        return " | ".join(self._form(form) for form in forms)

    def members(self, form: Object, syntax: ValueSyntax) -> str:
        """Return the name of the rule for the members of an object, without its brackets."""
        properties = [(key, state) for key, state in form.properties if self.schema.forms(state)]
        if syntax.is_sorted:
            properties.sort(key=lambda item: item[0].lower())
        name = f"{self.new_name('m')}_"
        comma = literal(syntax.comma)
        # `first` begins the object at a member, `rest` continues it there.
        for idx, (key, state) in enumerate(properties):
            named = " | ".join(literal(one + syntax.colon) for one in self._keys(key, syntax))
            member = f"({named}) {self.value(state)} {name}rest{idx + 1}"
            skip = "" if key in form.required else " | {}"
            self.lines.append(f"{name}first{idx}: {member}{skip.format(f'{name}first{idx + 1}')}")
            self.lines.append(f"{name}rest{idx}: {comma} {member}{skip.format(f'{name}rest{idx + 1}')}")
        first = rest = ""
        if self.schema.forms(form.additional):
            more = f"{name}more"
            key_rule = self.other_key(syntax, [key for key, _ in form.properties])
            self.lines.append(f"{more}: {key_rule} {literal(syntax.colon)} {self.value(form.additional)}")
            rest = repeated(f"{comma} {more}", form.min_others, form.max_others)
            first = _separated(more, comma, form.min_others, form.max_others)
        last = len(properties)
        empty = literal("")
        self.lines += [f"{name}first{last}: {first or empty}", f"{name}rest{last}: {rest or empty}"]
        return f"{name}first0"

    def text(self, forms: Iterable[Text], excluded: str = "", others: str = "") -> str:
        """Return the name of the terminal for the text of a string with any of the forms."""
        options = [f"({_text(form)}{f' & ~/{excluded}/' if excluded else ''})" for form in forms]
        options += [f"/{others}/"] if others else []
        return self.rule(" | ".join(options), "/(?s:.*)/", letter="T")

    def _form(self, form: Form) -> str:
        words = self.syntax.words
        if isinstance(form, Text):
            return self._string(form)
        if isinstance(form, Number):
            return self._number(form)
        if isinstance(form, Boolean):
            return " | ".join(literal(word) for value in form.values for word in words[json.dumps(value)])
        if isinstance(form, Array):
            return f'"[" {self._items(form)} "]"'
        if isinstance(form, Object):
            return f'"{{" {self.members(form, self.syntax)} "}}"'
        return " | ".join(map(literal, words["null"]))

    def _number(self, form: Number) -> str:
        if form.constants is not None:
            return " | ".join(literal(json.dumps(value)) for value in form.constants)
        return self.rule(_json(number_schema(form)), _json({"type": "number"}))

    def _string(self, form: Text) -> str:
        """Return the rule expression of a string with its quotes."""
        quote = self.syntax.quote
        if not quote:
            string = self.rule(_json(text_schema(form)), _json({"type": "string"}))
            # A pattern may have no text without a quote or a backslash.
            if not self.syntax.has_single_quotes or form.patterns:
                return string
            if form.constants is not None:
                return " | ".join([string, *(literal(f"'{one}'") for one in form.constants if _is_plain(one))])
            plain = f"/{SINGLE_QUOTED}/"
            return f"{string} | {self.rule(f'{plain} & {_text(form, APOSTROPHE)}', plain, letter='Q')}"
        text = self.text([form])
        ended = self.rule(f"{text} {literal(quote)}", option="[lazy]")
        if quote not in self.tokens:
            return f"{literal(quote)} {ended}"
        token = f"<[{self.tokens[quote]}]>"
        return f"{token} ({ended} | {text} {token})"

    def _items(self, form: Array) -> str:
        """Return the rule expression of the items of an array."""
        comma, length, most = literal(self.syntax.comma), len(form.prefix), form.max_items
        for idx, state in enumerate(form.prefix):
            if not self.schema.forms(state):  # there is no such item, and none after it
                length, most = idx, idx if most is None else min(idx, most)
                break
        expression = ""
        if self.schema.forms(form.items) and (most is None or most > length):
            item, low = self.value(form.items), max(form.min_items - length, 0)
            high = None if most is None else most - length
            expression = repeated(f"{comma} {item}", low, high) if length else _separated(item, comma, low, high)
        for idx in reversed(range(length if most is None else min(length, most))):
            expression = f"{f'{comma} ' if idx else ''}{self.value(form.prefix[idx])} {expression}"
            expression = expression if idx < form.min_items else f"({expression})?"
        return expression

    def other_key(self, syntax: ValueSyntax, keys: Sequence[str]) -> str:
        """Return the name of the terminal for a key that is not declared."""
        taken = "|".join(quoted(one) for key in keys for one in self._keys(key, syntax))
        single = f"|{SINGLE_QUOTED}" if syntax.has_single_quotes else ""
        key = f"/{syntax.bare_key}/" if syntax.bare_key else f"/{QUOTED_KEY}{single}/"
        if syntax.quote and not syntax.bare_key:
            key = f"/{quoted(syntax.quote)}(?s:.*){quoted(syntax.quote)}/"
        return self.rule(f"{key} & ~/({taken})/" if keys else key, letter="K")

    def rule(self, body: str, looser: str = "", *, letter: str = "r", option: str = "") -> str:
        """Return the name of the rule with a body; the first call adds the rule."""
        name = self._rules.get(option + body)
        if name is None:
            name = self.new_name(letter)
            name = self._rules[option + body] = name.upper() if letter.isupper() else name
            or_else = f"{OR_ELSE}{f'{name}: {looser}' if not self.is_strict else ''}" if looser else ""
            self.lines.append(f"{name}{option}: {body}{or_else}")
        return name

    def _keys(self, key: str, syntax: ValueSyntax) -> list[str]:
        """Return the spellings of a key."""
        if syntax.bare_key and re.fullmatch(syntax.bare_key, key):
            return [key]
        if syntax.quote:
            return [f"{syntax.quote}{key}{syntax.quote}"]
        has_single = syntax.has_single_quotes and _is_plain(key)
        return [json.dumps(key, ensure_ascii=False), *([f"'{key}'"] if has_single else [])]


def _is_plain(text: str) -> bool:
    """Return whether a text can be between single quotes without escapes."""
    return re.fullmatch(SINGLE_QUOTED, f"'{text}'") is not None


def _text(form: Text, quote: str = "") -> str:
    """Return the expression of a string for a terminal, between quotes if there are any."""
    most = "" if form.max_length is None else form.max_length
    limits = f"{{{form.min_length},{most}}}" if form.min_length or form.max_length is not None else "*"
    begin = f"(?s:.{limits})" if form.constants is None else "|".join(map(quoted, form.constants))
    return " & ".join(f"/{quote}({one}){quote}/" for one in (begin, *form.patterns))


def repeated(part: str, least: int, most: int | None) -> str:
    """Return the expression of a part that is repeated; "" if it may not occur."""
    if most == 0:
        return ""
    return f"({part})*" if least == 0 and most is None else f"({part}){{{least},{'' if most is None else most}}}"


def _separated(part: str, separator: str, least: int, most: int | None) -> str:
    """Return the expression of a part that is repeated, with a separator between; "" if it may not occur."""
    if most == 0:
        return ""
    repetition = repeated(f"{separator} {part}", max(least - 1, 0), None if most is None else most - 1)
    return f"{part} {repetition}" if least else f"({part} {repetition})?"


def _json(schema: Mapping[str, object]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}}, ensure_ascii=False)}"
