"""Marked texts behave as what they stand for, and keep their marks."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.text.chat.template_environment import TemplateState, make_environment
from quire.text.vocabulary.marks import LENIENT, STRICT, MarkedTexts, Marks

MARKS = Marks(MarkedTexts("<>", ("end", "name of")))
CHARS = "<><>ab \n\t.\\"
WORDS = ("<", ">", "<a>", "a", " ", "\n", "b<", "</a>", "", "ab")


def raw(text: str) -> str:
    """Return a text that is searched by its characters."""
    return str.translate(text, {})


def texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple):
        return [text for each in value for text in texts_in(each)]
    return []


# Expressions of a text and two words, that add none of the marked characters.
ASKED = (
    *("a in text", "text == a", "a == text", "text != a", "hash(text)", "text < a", "text in [a, b]", "text in {a: 1}"),
    *("text.find(a)", "text.rfind(b)", "text.count(a or 'x')", "text.startswith(a)", "text.endswith(b)"),
    *("text.startswith((a, b))", "text.isspace()", "text.isalpha()", "text.isupper()", "text.isascii()"),
    *("len(text)", "bool(text)"),
)
MADE = (
    *("text.strip()", "text.lstrip()", "text.rstrip()", "text.strip(a)", "text.lstrip(a)", "text.rstrip(b)"),
    *("text.split()", "text.rsplit()", "text.split(a or 'x')", "text.rsplit(a or 'x', 1)", "text.split(None, 1)"),
    *("text.rsplit(None, 2)", "text.split(a or 'x', 1)", "text.partition(a or 'x')", "text.rpartition(b or 'x')"),
    *("text.splitlines()", "text.splitlines(True)", "text.removeprefix(a)", "text.removesuffix(b)"),
    *(
        "text.removeprefix(text)",
        "text.removesuffix('')",
        "text[1:]",
        "text[:-2]",
        "text[::-1]",
        "text[2:5]",
        "text[:1]",
    ),
    *("list(text)", "text.upper()", "text.lower()", "text.title()", "text.capitalize()", "text.swapcase()"),
    *("text.center(40)", "text.ljust(30, '-')", "text.rjust(30)", "text.zfill(9)", "text.expandtabs(3)"),
    *("text.replace(a, '-')", "text.replace(a, '', 1)", "text.replace('', '.')", "text.replace(b, a)[:0]"),
    *("text + 'x'", "'x' + text", "text + text", "text * 2", "2 * text", "text.join(['a', 'b'])", "'-'.join([text])"),
    *("f'{text}'", "'{}'.format(text)", "'%s' % text", "f'{text:>20}'", "str(text)", "repr(text)", "repr([text])"),
    "json.dumps(text, ensure_ascii=False)",
)


@pytest.mark.parametrize("expression", [*ASKED, *MADE])
def test_a_marked_text_is_like_the_text_that_it_stands_for(expression: str) -> None:
    rng, code = random.Random(expression), compile(expression, expression, "eval")
    for _ in range(60):
        text = "".join(rng.choice(CHARS) for _ in range(rng.randint(0, 14)))
        a, b = rng.choice(WORDS), rng.choice(WORDS)
        marked = MARKS.put(text, first=rng.choice([STRICT, LENIENT]))
        wanted = eval(code, {"text": text, "a": a, "b": b, "json": json})
        for words in ({"a": a, "b": b}, {"a": MARKS.put(a), "b": MARKS.put(b)}):
            found = eval(code, {"text": marked, "json": json, **words})
            if expression in ASKED:
                assert found == wanted
                continue
            assert [MARKS.remove(each) for each in texts_in(found)] == texts_in(wanted)
            # Each of the characters in the result is the client's.
            assert not any(char in raw(each) for each in texts_in(found) for char in "<>")


def test_values_without_marks_stay_what_they_are() -> None:
    value = {"a": ["b", 1, None, {"c": "d"}], "e": True}
    assert MARKS.put(value) is value
    nested: dict[str, Any] = {"a": ["b", {"<": "c"}], "d": {"e": "f"}}
    put = MARKS.put(nested)
    assert put == nested
    assert put["d"] is nested["d"]
    assert [raw(key) for key in put["a"][1]] == ["\ud800"]
    assert nested == {"a": ["b", {"<": "c"}], "d": {"e": "f"}}


def test_a_text_that_completes_a_token_gets_a_mark_on_its_first_character() -> None:
    assert [MARKS.remove(raw(MARKS.put(text))) for text in ("end", " end\n", "name of")] == ["end", " end\n", "name of"]
    assert [raw(MARKS.put(text)) != text for text in ("end", " end\n", "ends", "the end", "name of")] == [
        *(True, True, False, False, True)
    ]


def test_surrogates_of_clients_are_replaced() -> None:
    assert raw(MARKS.put("\ud800<\udc01")) == "\ufffd\ud800\ufffd"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ x | tojson }}", '"<a> \\"\\\\\\" é"'),
        ("{{ x | tojson(ensure_ascii=true) }}", '"<a> \\"\\\\\\" \\u00e9"'),
        ("{{ {x: x} | tojson(sort_keys=true, indent=1) }}", '{\n "<a> \\"\\\\\\" é": "<a> \\"\\\\\\" é"\n}'),
        ("{{ x | escape }}", "&lt;a&gt; &#34;\\&#34; é"),
        ("{{ (x | safe) + '<' }}", '<a> "\\" é&lt;'),
        ("{{ x | trim | replace('<a>', '') | upper }}", ' "\\" É'),
        ("{% macro m(y) %}-{{ y }}-{% endmacro %}{{ '<a>' in m(x) }}", "True"),
        ("{% set y %}{{ x }}{% endset %}{{ y.split('>')[0] }}", "<a"),
        ("{{ '<a>' in 1 ~ x ~ 2 }}", "True"),
        ("{{ x | first }}{{ x | last }}{{ x | list | length }}", "<é9"),
        ("{{ [x] | map('trim') | join(',') }}", '<a> "\\" é'),
        ("{{ x if x is string and x is not none and x else 'no' }}", '<a> "\\" é'),
        ("{{ '\\\\ud800' }}{{ y | tojson(ensure_ascii=true) }}", '\\ud800"\\\\ud800\\u003c"'.replace("\\u003c", "<")),
    ],
)
def test_filters_and_blocks_of_templates_keep_marks(source: str, wanted: str) -> None:
    state = TemplateState()
    template = make_environment(state).from_string(source)
    values = {"x": '<a> "\\" é', "y": "\\ud800<"}
    assert template.render(values) == wanted
    state.marks = MARKS
    found = template.render({name: MARKS.put(value) for name, value in values.items()})
    assert MARKS.remove(found) == wanted
    assert "<" not in raw(found)
