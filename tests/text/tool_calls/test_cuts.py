"""A call that the end of the output truncates is never content, wherever the cut is."""

from __future__ import annotations

import pytest

from quire.text.tool_calls import CallDelta, CallParser, Function, ToolFormat, merge
from quire.text.tool_calls.calls import Piece
from tests.text.tool_calls.markups import form_of

FUNCTIONS = (Function("add", {}), Function("get_weather", {"properties": {"city": {"type": "string"}}}))
PARIS = '{"city": "Paris"}'
PLAIN_CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
ADD_CALL = '{"name": "add", "arguments": {}}'
# The form, its markup, and the calls as a grammar writes them; the last text is the one
# with which the name of the first call is complete.
CASES = [
    ("hermes", "", f"<tool_call>\n{PLAIN_CALL}\n</tool_call>\n<tool_call>\n{ADD_CALL}\n</tool_call>", 'weather"'),
    ("llama3", "", f"{PLAIN_CALL}; {ADD_CALL}".replace("arguments", "parameters"), 'weather"'),
    ("mistral", "", f"[TOOL_CALLS] [{PLAIN_CALL}, {ADD_CALL}]", 'weather"'),
    (
        "mistral",
        "ids",
        f"[TOOL_CALLS]get_weather[CALL_ID]x1y2z3a4b[ARGS]{PARIS}[TOOL_CALLS]add[ARGS]{{}}",
        "weather[",
    ),
    (
        "qwen3_xml",
        "",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        "weather>",
    ),
    (
        "gemma4",
        "",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>call:add{}<tool_call|>',
        "weather{",
    ),
    ("lfm2", "", '<|tool_call_start|>[get_weather(city="Paris"), add()]<|tool_call_end|>', "weather("),
    (
        "deepseek",
        "",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "weather<",
    ),
    (
        "deepseek",
        "fenced",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "weather\n",
    ),
    (
        "harmony",
        "",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
        "weather ",
    ),
]


def read(form: ToolFormat, parts: list[str], *, is_required: bool) -> tuple[str, list[CallDelta], CallParser]:
    """Return the content and the calls of an output that arrives in parts."""
    parser = CallParser(form, FUNCTIONS, is_forced=True, is_required=is_required)
    pieces: list[Piece] = merge([piece for part in parts for piece in parser.push(part)] + parser.finish())
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, CallDelta)], parser


@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize(("name", "markup", "text", "named"), CASES)
def test_a_call_that_has_begun_is_no_content(name: str, markup: str, text: str, named: str, is_required: bool) -> None:
    form = form_of(name, markup)
    # With text before them, calls of Llama's format have a mark; without it their mark is the name.
    heads = [""] if is_required else ["", f"I look.\n{form.marker if form.may_be_bare else ''}"]
    for head in heads:
        written = head + text
        has_mark = form.marker in written
        begun = written.index(form.marker) + len(form.marker) if has_mark else written.index(named) + len(named)
        _, whole, _ = read(form, [written], is_required=is_required)
        assert [call.name for call in whole] == (["get_weather"] if name == "harmony" else ["get_weather", "add"])
        for end in range(len(written)):
            cut = written[:end]
            content, calls, parser = read(form, [cut], is_required=is_required)
            streamed = read(form, list(cut), is_required=is_required)
            assert (content, calls) == streamed[:2], cut
            assert parser.is_inside_call == streamed[2].is_inside_call, cut
            if is_required:
                assert content == "", cut
            elif end >= begun:
                # Behind a call that is whole there may be text, which a part of a mark may be.
                rest = content.removeprefix("I look." if head else "")
                assert len(rest.strip("\n")) < len(form.marker), cut
                assert form.marker.startswith(rest.strip("\n")), cut
            else:
                assert content == cut, cut
            # The calls are those of the whole text, the last one as far as it goes, from its name on.
            assert bool(calls) == (written.index(named) + len(named) <= end), cut
            for call, full in zip(calls, whole, strict=False):
                assert call.name == full.name, cut
                assert full.arguments.startswith(call.arguments), cut
            assert all(call.is_last for call in calls[:-1]), cut
            assert parser.num_calls == len(calls), cut


@pytest.mark.parametrize(
    ("text", "is_inside"), [("", False), ("\n", False), ("\n<tool", False), ("\n<tool_call>", True)]
)
def test_what_follows_a_whole_call_says_whether_it_is_the_last_one(text: str, is_inside: bool) -> None:
    form = form_of("hermes")
    written = f"<tool_call>\n{ADD_CALL}\n</tool_call>{text}"
    content, calls, parser = read(form, [written], is_required=False)
    assert (content, len(calls), parser.is_inside_call) == ("\n<tool" if text == "\n<tool" else "", 1, is_inside)
    content, calls, parser = read(form, [written], is_required=True)
    assert (content, len(calls), parser.is_inside_call) == ("", 1, "<" in text)


def test_a_marker_in_an_answer_of_another_form_is_content() -> None:
    # With response_format, JSON may be written beside the calls.
    form = form_of("hermes")
    for answer in ('{"a": "<tool_call>"}', '{"a": "<tool_call> {"}', '{"a": "<tool_call>x'):
        content, calls, parser = read(form, [answer], is_required=False)
        assert (content, calls, parser.is_inside_call) == (answer, [], False)
