"""Formats that do not write arguments as JSON, or put marks around them: round trips, broken calls, grammars."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.errors import InvalidParameter
from quire.sequences.structured import StructuredOutputs
from quire.text.chat.written_calls import written_calls
from quire.text.tool_calls import CallDelta, CallParser, CallRules, Function, merge
from quire.text.tool_calls.argument_schema import read_schema, types_of
from quire.text.tool_calls.calls import Piece
from quire.text.tool_calls.grammar import calls_or_answer
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.typed_values import typed_json
from quire.text.tool_calls.value_grammar import ABILITIES
from tests.text.tool_calls.markups import form_of
from tests.text.tool_calls.test_grammars import MARKERS, Walker

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
        "deep": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "tag": {"type": "string"}},
            "required": ["x"],
        }
    },
}
FUNCTION = Function("look", SCHEMA)
FUNCTIONS = (FUNCTION, Function("now", {"type": "object", "properties": {}, "additionalProperties": False}))
FORMS = [("qwen3_xml", ""), ("gemma4", ""), ("lfm2", ""), ("deepseek", ""), ("deepseek", "fenced")]
TEXTS = [
    "Rome",
    "null",
    "5",
    "true",
    'say "hi"',
    "it's",
    "a\\b\\n",
    "two\nlines",
    "ünï 🦄",
    "</parameter",
    "{}",
    "[1]",
    ", ",
]


def xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma_value(one)}' for key, one in sorted(value.items()))}}}"
    return f"[{','.join(map(gemma_value, value))}]" if isinstance(value, list) else json.dumps(value)


def write(name: str, markup: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls as a model of the format writes them."""
    if name == "lfm2":
        return written_calls([{"function": {"name": called, "arguments": given}} for called, given in calls])
    texts = []
    for called, given in calls:
        if name == "qwen3_xml":
            inner = "".join(f"<parameter={key}>\n{xml_value(one)}\n</parameter>\n" for key, one in given.items())
            texts.append(f"<tool_call>\n<function={called}>\n{inner}</function>\n</tool_call>")
        elif name == "gemma4":
            texts.append(f"<|tool_call>call:{called}{gemma_value(given)}<tool_call|>")
        else:
            body = f"{called}<｜tool▁sep｜>{json.dumps(given)}"
            if markup:
                body = f"function<｜tool▁sep｜>{called}\n```json\n{json.dumps(given)}\n```"
            texts.append(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>")
    text = ("\n" if name == "qwen3_xml" or markup else "").join(texts)
    return f"<｜tool▁calls▁begin｜>{text}<｜tool▁calls▁end｜>" if name == "deepseek" else text


def random_arguments(rng: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {"city": rng.choice(TEXTS), "days": rng.randrange(1, 10**9)}
    if rng.random() < 0.5:
        given["unit"] = rng.choice("CF")
    if rng.random() < 0.5:
        given["note"] = rng.choice([None, "so", "so\n"])
    if rng.random() < 0.5:
        given["points"] = [
            {"x": rng.choice([1, -2.5, 1e-7]), "tag": rng.choice(TEXTS)} for _ in range(rng.randrange(3))
        ]
    if rng.random() < 0.5:
        given["deep"] = rng.random() < 0.5
    return given


def read(name: str, parts: list[str], *, is_forced: bool = False) -> list[Piece]:
    form = form_of(name)
    parser = CallParser(form, FUNCTIONS, is_forced=is_forced)
    return merge([piece for part in parts for piece in parser.push(part)] + parser.finish())


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(("name", "markup"), FORMS)
def test_random_calls_are_read_wherever_they_are_cut(name: str, markup: str, is_forced: bool) -> None:
    rng = random.Random(name + markup)
    for _ in range(12):
        calls = [
            ("look", random_arguments(rng)) if rng.random() < 0.8 else ("now", {}) for _ in range(rng.randrange(1, 4))
        ]
        text = "I look.\n" + write(name, markup, calls)
        content, *pieces = read(name, [text], is_forced=is_forced)
        assert content == "I look."
        assert [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, CallDelta)] == calls
        assert [piece.index for piece in pieces if isinstance(piece, CallDelta) and piece.is_last] == [
            *range(len(calls))
        ]
        assert read(name, list(text), is_forced=is_forced) == [content, *pieces]
        for cut in range(0, len(text), 7):
            assert read(name, [text[:cut], text[cut:]], is_forced=is_forced) == [content, *pieces]


BROKEN = {
    "qwen3_xml": [
        ("<function=look>", "<function=drop>"),
        ("<function=", "<fun="),
        ("</parameter>", "</param>"),
        ("</function>", ""),
        ("</tool_call>", "and so on"),
        ("<parameter=", "<parameter "),
    ],
    "gemma4": [
        *(("call:look", "call:drop"), ("call:", ""), ("}", ""), ("<tool_call|>", " so")),
        *(("days:", "days "), (":3", ":3x")),
    ],
    "lfm2": [
        *(("look(", "drop("), ("look(", "look "), ("[", ""), (")", ""), ("]", " so]")),
        *(("days=", "days:"), ("3", "3x")),
    ],
    "deepseek": [
        *(("look", "drop"), ("<｜tool▁sep｜>", ""), ("}", ""), ('"days"', "days")),
        ("<｜tool▁call▁begin｜>", ""),
    ],
}


@pytest.mark.parametrize(("name", "markup"), FORMS)
def test_a_broken_call_is_content(name: str, markup: str) -> None:
    text = write(name, markup, [("look", {"city": "Rome", "days": 3})])
    assert isinstance(read(name, [text])[0], CallDelta)
    for old, new in BROKEN[name]:
        broken = text.replace(old, new)
        assert broken != text
        assert read(name, [broken]) == [broken], (old, new)
        assert read(name, list(broken)) == [broken], (old, new)


@pytest.mark.parametrize(("name", "markup"), FORMS)
def test_the_end_of_the_output_may_cut_the_closing_mark(name: str, markup: str) -> None:
    for called in ("look", "now"):
        text = write(name, markup, [(called, {"city": "Rome", "days": 3} if called == "look" else {})])
        whole = read(name, [text])
        mark = {"qwen3_xml": 12, "gemma4": 12, "lfm2": 17, "deepseek": 19}[name]
        for cut in range(1, mark):
            assert read(name, [text[:-cut]]) == whole


@pytest.mark.parametrize(("name", "markup"), FORMS)
def test_a_call_that_the_length_cuts_off_has_begun_and_has_no_end(name: str, markup: str) -> None:
    text = write(name, markup, [("look", {"city": "Rome", "days": 3})])
    (piece,) = read(name, list(text[: text.index("days")]), is_forced=True)
    assert isinstance(piece, CallDelta)
    assert not piece.is_last
    assert piece.arguments.startswith('{"city": "Rome"')


@pytest.mark.parametrize("name", ["qwen3_xml", "gemma4", "lfm2"])
def test_many_broken_calls_take_linear_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = {
        "qwen3_xml": "<tool_call><function=look><parameter=city>",
        "gemma4": '<|tool_call>call:look{city:[<|"|>',
        "lfm2": "<|tool_call_start|>[look(city='",
    }[name]
    reader, steps = Incoming.past_space, 0

    def counted(self: Incoming, pos: int) -> Reading:
        nonlocal steps
        steps += 1
        return reader(self, pos)

    monkeypatch.setattr(Incoming, "past_space", counted)
    assert read(name, [begin * 1000]) == [begin * 1000]
    assert steps < 1000 * 20


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "string"}, '"5"'),
        ("5", {"type": "integer"}, "5"),
        ("5", {"type": "number"}, "5"),
        ("5.5", {"type": ["integer", "string"]}, '"5.5"'),
        ("True", {"type": "boolean"}, "true"),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "null"),
        ("x", {"type": "integer"}, '"x"'),
        (" [1, 2]\n", {"type": "array"}, "[1, 2]"),
        ("NaN", {"type": "number"}, '"NaN"'),
        ('{"a": 1}', {"$ref": "#/$defs/a"}, '{"a": 1}'),
        ("1", {"$ref": "#/$defs/loop"}, "1"),
        ("1", {"enum": ["1", "2"]}, '"1"'),
        ("1", {"const": 1}, "1"),
        ("x", {}, '"x"'),
        ("[" * 5000, {}, json.dumps("[" * 5000)),
    ],
)
def test_the_schema_decides_on_the_type_of_a_text(text: str, schema: dict[str, Any], expected: str) -> None:
    definitions = {"a": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}}
    function = Function("f", {"type": "object", "properties": {"x": schema}, "$defs": definitions})
    assert typed_json(text, types_of(read_schema(function, ABILITIES), "x")) == expected


@pytest.fixture(scope="module")
def walkers() -> dict[str, Walker]:
    return {name: Walker(MARKERS[name], "special") for name, _ in FORMS}


GOOD: list[dict[str, Any]] = [
    {"city": "Rome", "days": 3},
    {"city": "5", "days": 1, "unit": "F", "note": None, "points": [{"x": 1.5, "tag": "a"}, {"x": 2}], "deep": True},
    {"city": "a b\nc", "days": 1, "note": "so", "points": []},
]
BAD: list[dict[str, Any]] = [
    {},
    {"city": "Rome"},
    {"city": "", "days": 1},
    {"city": "Rome", "days": 0},
    {"city": "Rome", "days": "x"},
    {"city": "Rome", "days": 1, "unit": "K"},
    {"city": "Rome", "days": 1, "more": 1},
    {"city": "Rome", "days": 1, "points": [{"tag": "a"}]},
    {"city": "Rome", "days": 1, "points": [{"x": 1, "y": 1}]},
    {"city": "Rome", "days": 1, "points": [{"x": 1}] * 3},
    {"city": "Rome", "days": 1, "deep": 1},
]


@pytest.mark.parametrize(("name", "markup"), FORMS)
def test_grammars_take_valid_calls_and_no_others(name: str, markup: str, walkers: dict[str, Walker]) -> None:
    walker, form = walkers[name], form_of(name, markup)

    def takes(text: str, **rules: Any) -> bool:
        return walker.takes(form.grammar(CallRules(functions=FUNCTIONS, tokens=walker.tokens, **rules)), text)

    for given in GOOD:
        text = write(name, markup, [("look", given)])
        assert takes(text, is_required=True), text
        assert takes(text), text
        assert takes(f"I look. {text}"), text
        assert not takes(f"I look. {text}", is_required=True)
    for given in BAD:
        text = write(name, markup, [("look", given)])
        assert not takes(text), text
        assert not takes(text, is_required=True), text
    two = write(name, markup, [("look", GOOD[0]), ("now", {})])
    assert takes(two, is_required=True)
    assert not takes(two, is_required=True, is_parallel=False)
    assert not takes(two, is_parallel=False)
    assert takes("It rains.")
    assert not takes("It rains.", is_required=True)
    assert not takes(write(name, markup, [("drop", {})]))


@pytest.mark.parametrize(("name", "markup"), FORMS)
def test_an_answer_beside_calls_has_its_form(name: str, markup: str, walkers: dict[str, Walker]) -> None:
    walker, form = walkers[name], form_of(name, markup)
    calls = form.grammar(CallRules(functions=FUNCTIONS, is_required=True, tokens=walker.tokens))
    grammar = calls_or_answer(calls, StructuredOutputs(json={"enum": ["yes", 5]}), form.answer_head)
    for text in (write(name, markup, [("now", {})]), '"yes"', "5"):
        assert walker.takes(grammar, text), text
    for text in ("yes", "", write(name, markup, [("drop", {})])):
        assert not walker.takes(grammar, text), text


@pytest.mark.parametrize("name", ["qwen3_xml", "gemma4", "lfm2"])
def test_further_keys_come_only_where_the_schema_asks(name: str, walkers: dict[str, Walker]) -> None:
    form, walker = form_of(name), walkers[name]
    text = write(name, "", [("f", {"a": 1, "b": 2})])
    for further, is_taken in ((None, False), (True, True), ({"type": "integer"}, True), ({"enum": [5]}, False)):
        schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
        if further is not None:
            schema["additionalProperties"] = further
        rules = CallRules(functions=[Function("f", schema)], is_required=True, tokens=walker.tokens)
        assert walker.takes(form.grammar(rules), text) == is_taken, further


@pytest.mark.parametrize("name", ["qwen3_xml", "gemma4", "lfm2"])
def test_a_strict_function_refuses_a_key_that_is_not_enforced(name: str) -> None:
    form = form_of(name)
    for key, inner in (("uniqueItems", True), ("patternProperties", {"^a": {}})):
        schema = {"type": "object", "properties": {"a": {key: inner}}}
        assert form.grammar(CallRules(functions=[Function("f", schema)]))
        with pytest.raises(InvalidParameter, match=rf"properties\.a: {key} cannot be enforced, since"):
            form.grammar(CallRules(functions=[Function("f", schema, is_strict=True)]))


def test_gemma_writes_paths_as_keys_without_quotes(walkers: dict[str, Walker]) -> None:
    form, walker = form_of("gemma4"), walkers["gemma4"]
    given = {"params": {"/Applications/My.app": "a", "x-y@z": {"$ref": "b"}}}
    text = write("gemma4", "", [("f", given)])
    function = Function("f", {"type": "object", "properties": {"params": {"type": "object"}}})
    parser = CallParser(form, [function], is_forced=False)
    (call,) = merge(parser.push(text) + parser.finish())
    assert isinstance(call, CallDelta)
    assert json.loads(call.arguments) == given
    rules = CallRules(functions=[function], is_required=True, tokens=walker.tokens)
    assert walker.takes(form.grammar(rules), text)
