"""Calls are found wherever the text is cut, and nothing that only looks like one is taken for a call."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.tool_calls import FORMATS, CallDelta, CallParser, Function, merge
from quire.text.tool_calls.calls import Piece
from tests.text.tool_calls.markups import form_of
from tests.text.tool_calls.whole import read_whole

FUNCTIONS = (Function("add", {}), Function("get_weather", {}))
NAMES = frozenset(function.name for function in FUNCTIONS)


def read(name: str, pieces: list[str], *, is_forced: bool = False) -> tuple[list[Piece], CallParser]:
    parser = CallParser(form_of(name), FUNCTIONS, is_forced=is_forced)
    found = [item for piece in pieces for item in parser.push(piece)]
    return merge(found + parser.finish()), parser


def call(index: int, name: str, arguments: str, is_last: bool = True) -> CallDelta:
    return CallDelta(index, name, arguments, is_last)


# The formats that the slow twin reads.
TWINS = ("hermes", "llama3", "mistral")
ADD = '{"name": "add", "arguments": {"a": 1}}'
READ: list[tuple[str, str, list[Piece]]] = [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", [call(0, "add", '{"a": 1}')]),
    ("hermes", f"Well.\n<tool_call>{ADD}</tool_call>\n", ["Well.", call(0, "add", '{"a": 1}')]),
    (
        "hermes",
        f'<tool_call>{ADD}</tool_call>\n<tool_call>{{"arguments": {{}}, "name": "add"}}</tool_call>\nSo.\n',
        [call(0, "add", '{"a": 1}'), call(1, "add", "{}"), "\nSo.\n"],
    ),
    ("hermes", f"<tool_call>{ADD}", [call(0, "add", '{"a": 1}')]),
    ("hermes", f"<tool_call>{ADD}</tool", [call(0, "add", '{"a": 1}')]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>\\"}\\\\"}}</tool_call>',
        [call(0, "add", '{"a": "</tool_call>\\"}\\\\"}')],
    ),
    ("llama3", ADD.replace("arguments", "parameters"), [call(0, "add", '{"a": 1}')]),
    ("llama3", f" {ADD} ; {ADD};", [call(0, "add", '{"a": 1}'), call(1, "add", '{"a": 1}')]),
    ("llama3", f"<|python_tag|>{ADD}", [call(0, "add", '{"a": 1}')]),
    ("llama3", f"I will. <|python_tag|>{ADD}; {ADD}", ["I will.", *(call(i, "add", '{"a": 1}') for i in (0, 1))]),
    ("llama3", '{"type": "function", "name": "add", "parameters": {}}', [call(0, "add", "{}")]),
    ("mistral", f"[TOOL_CALLS] [{ADD}, {ADD}]", [call(0, "add", '{"a": 1}'), call(1, "add", '{"a": 1}')]),
    ("mistral", f"Yes\n[TOOL_CALLS][{ADD}", ["Yes", call(0, "add", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', [call(0, "add", '{"a": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]x1y2z3a4b[ARGS]{}',
        [call(0, "add", '{"a": 1}'), call(1, "get_weather", "{}")],
    ),
]
CONTENT: list[tuple[str, str]] = [
    *((name, text) for name in TWINS for text in ("", " ", "plain text\n", '{"a": {"b": 1}} and', "<tool [TOOL <|py")),
    ("hermes", "Write <tool_call> to call."),
    ("hermes", '<tool_call>\n{"name": "drop_tables", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": ["add"], "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {}, "parameters": {}}\n</tool_call>'),
    ("hermes", f"<tool_call>{ADD} and so on"),
    ("hermes", '<tool_call>\n{"name": "add", "argum'),
    ("hermes", ADD),
    ("llama3", f"It is {ADD}"),
    ("llama3", f"{ADD} is how"),
    ("llama3", '{"name": "Bob", "parameters": {}}'),
    ("llama3", f"{ADD}; nothing"),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", f"[TOOL_CALLS] [{ADD}, 1]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", '[TOOL_CALLS]drop_tables[ARGS]{"a": 1}'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1'),
    ("mistral", "[TOOL_CALLS]add"),
]


@pytest.mark.parametrize(("name", "text", "expected"), READ)
def test_calls_are_read(name: str, text: str, expected: list[Piece]) -> None:
    assert read(name, [text])[0] == expected
    assert read(name, list(text))[0] == expected
    assert read_whole(name, text, NAMES) == expected


@pytest.mark.parametrize(("name", "text"), CONTENT)
def test_what_only_looks_like_a_call_is_content(name: str, text: str) -> None:
    expected = [text] if text else []
    assert read(name, [text])[0] == expected
    assert read(name, list(text))[0] == expected
    assert read_whole(name, text, NAMES) == expected


# What outputs are made of: calls, and these broken in every way.
CALLS = [text for _, text, _ in READ]
SHARDS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[", "]", ",", ";"),
    *(" ", "\n", "hi", "{", "}", '"', "\\", "<", "add", "{}", '{"a": {"b": "}\\""}}', ADD),
    *(
        "<function=add>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<|tool_call>call:add{",
        'a:<|"|>',
        '<|"|>',
        "}",
    ),
    *("<tool_call|>", "<|tool_call_start|>", "[add(", "a='b'", ")", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>"),
    *(
        "<｜tool▁call▁begin｜>function",
        "<｜tool▁sep｜>add",
        "\n```json\n",
        "```",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|channel|>commentary to=functions.add", " <|constrain|>json", "<|message|>", "<|call|>"),
    *('{"name": "add", "parameters": {}}', '{"arguments": {"x": [{}]}, "name": "get_weather"}'),
    *('{"name": "get_weather", "arguments": {', '"name": "add", ', '"arguments": {"arguments": {}}', "NaN"),
]
PARTS = st.sampled_from(CALLS) | st.sampled_from([" ", "\n", "hi"]) | st.sampled_from(SHARDS)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    text=st.lists(PARTS, max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_the_cuts_of_a_text_change_nothing_and_the_slow_twin_agrees(name: str, text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    expected = read(name, [text])[0]
    assert read(name, pieces)[0] == expected
    assert read(name, list(text))[0] == expected
    if name in TWINS:
        assert expected == read_whole(name, text, NAMES)
    for is_forced in (False, True):
        whole, parser = read(name, [text], is_forced=is_forced)
        assert read(name, pieces, is_forced=is_forced)[0] == whole
        last = [piece for piece in whole if isinstance(piece, CallDelta)][-1:]
        is_inside = any(not piece.is_last for piece in last)
        # Under a grammar the output may end inside a call that has no name yet.
        assert parser.is_inside_call >= is_inside if is_forced else parser.is_inside_call == is_inside
        assert parser.num_calls == sum(isinstance(piece, CallDelta) for piece in whole)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hermes", '\n<tool_call>\n{{"name": "add", "arguments": {args}}}\n</tool_call>'),
        ("llama3", '{{"name": "add", "parameters": {args}}}'),
        ("mistral", '[TOOL_CALLS] [{{"name": "add", "arguments": {args}}}]'),
        ("mistral", "[TOOL_CALLS]add[ARGS]{args}"),
    ],
)
def test_arguments_under_a_grammar_are_passed_through_verbatim(name: str, form: str) -> None:
    arguments = json.dumps({"a": "x" * 30, "b": [{"c": '"}\\'}, 1.5, None], "</tool_call>": {}})
    parser = CallParser(form_of(name), FUNCTIONS, is_forced=True)
    found = [parser.push(char) for char in form.format(args=arguments)]
    assert merge(piece for pieces in found for piece in pieces) == [call(0, "add", arguments)]
    deltas = [piece for pieces in found for piece in pieces if isinstance(piece, CallDelta)]
    # One piece for each character, but the first, in which the name comes too.
    assert len([piece for piece in deltas if piece.arguments]) == len(arguments)
    assert [piece.name for piece in deltas if piece.name] == ["add"]
    assert parser.finish() == []


# No grammar lets the name come last.
@pytest.mark.parametrize(("name", "text", "expected"), [case for case in READ if '"name": "add"}' not in case[1]])
def test_a_grammar_kept_to_gives_the_same_calls(name: str, text: str, expected: list[Piece]) -> None:
    assert read(name, list(text), is_forced=True)[0] == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": "x', '{"a": "x'),
        ("llama3", '{"name": "add", "parameters": {"a": {', '{"a": {'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a', '{"a'),
    ],
)
def test_a_call_that_the_length_cuts_off_is_told_as_far_as_it_goes(name: str, text: str, expected: str) -> None:
    found, parser = read(name, list(text), is_forced=True)
    assert found == [call(0, "add", expected, is_last=False)]
    assert parser.is_inside_call


def test_content_is_held_back_no_longer_than_it_must_be() -> None:
    parser = CallParser(form_of("hermes"), FUNCTIONS, is_forced=False)
    assert parser.push("Hello <tool") == ["Hello"]
    assert parser.push("box>") == [" <toolbox>"]
    assert parser.push(" <tool_call>") == []
    assert parser.push("\n{x") == [" <tool_call>\n{x"]


@pytest.mark.parametrize(
    "text",
    ['<tool_call>{"', '<tool_call>{"a": ', "<tool_call>{", '<tool_call>{"a\\": "', '<tool_call>{":1,"', "<tool_call>"],
)
def test_many_broken_calls_take_linear_work(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.text.tool_calls import incoming

    steps = 0

    class Counted:
        def __init__(self, pattern: Any) -> None:
            self._pattern = pattern

        def search(self, *args: Any) -> Any:
            nonlocal steps
            steps += 1
            return self._pattern.search(*args)

    monkeypatch.setattr(incoming, "STRUCTURE", Counted(incoming.STRUCTURE))
    monkeypatch.setattr(incoming, "IN_STRING", Counted(incoming.IN_STRING))
    assert read("hermes", [text * 2000])[0] == [text * 2000]
    assert steps < 2000 * 20
