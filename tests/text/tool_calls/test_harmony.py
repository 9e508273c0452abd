"""Harmony's calls, between the parser of reasoning and that of calls, and under the grammar of the whole output."""

from __future__ import annotations

import json

import pytest

from quire.sequences.structured import StructuredOutputs
from quire.sequences.thinking import ThinkingPhase
from quire.text.reasoning import REASONING_FORMATS
from quire.text.tool_calls import CallDelta, CallParser, CallRules, merge
from quire.text.tool_calls.calls import Piece
from quire.text.tool_calls.grammar import calls_or_answer
from quire.text.tool_calls.harmony import HarmonyCalls
from tests.text.tool_calls.schema_check import fits
from tests.text.tool_calls.test_grammars import FUNCTIONS, SCHEMAS, Walker

THOUGHT = "<|channel|>analysis<|message|>It rains?<|end|><|start|>assistant"
ARGUMENTS = '{"city": "Rome", "days": 1}'
CALLED = [CallDelta(0, "get_weather", ARGUMENTS, is_last=True)]


def read(parts: list[str], *, is_forced: bool) -> tuple[str, list[Piece]]:
    """Return the reasoning and the pieces of an output that arrives in parts."""
    reasoning = REASONING_FORMATS["harmony"].parser(ThinkingPhase.BEFORE)
    calls = CallParser(HarmonyCalls(), FUNCTIONS, is_forced=is_forced)
    thoughts, pieces = "", []
    for split in [*(reasoning.push(part) for part in parts), reasoning.finish()]:
        thoughts += split.reasoning
        pieces += calls.push(split.content)
    return thoughts, merge(pieces + calls.finish())


@pytest.mark.parametrize("is_forced", [True, False])
@pytest.mark.parametrize("end", ["<|call|>", "", "<|ca"])
@pytest.mark.parametrize(
    "head",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|message|>",
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        "<|channel|>analysis to=functions.get_weather code<|message|>",
    ],
)
def test_a_call_is_read_wherever_its_header_has_the_recipient(head: str, end: str, is_forced: bool) -> None:
    for thought in ("", THOUGHT):
        text = f"{thought}{head}{ARGUMENTS}{end}"
        expected = ("It rains?" if thought else "", CALLED)
        assert read([text], is_forced=is_forced) == expected
        assert read(list(text), is_forced=is_forced) == expected


def test_a_preamble_is_content_and_other_recipients_are_too() -> None:
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    assert read([preamble + call], is_forced=False) == ("", ["I look.", *CALLED])
    for unknown in ("functions.drop", "browser.search"):
        _, pieces = read([call.replace("functions.get_weather", unknown)], is_forced=False)
        assert pieces == [f"<|channel|>commentary to={unknown}<|message|>{ARGUMENTS}<|call|>"]
    _, pieces = read([call.replace('"days": 1', '"days": 1}')], is_forced=False)
    assert all(isinstance(piece, str) or piece.arguments == ARGUMENTS for piece in pieces)


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(HarmonyCalls.other_markers, "special")


@pytest.mark.parametrize("is_required", [True, False])
def test_the_grammar_has_the_whole_output(walker: Walker, is_required: bool) -> None:
    rules = CallRules(functions=FUNCTIONS, is_required=is_required, tokens=walker.tokens)
    grammar = HarmonyCalls().grammar(rules)
    num_calls = 0
    for seed in range(8):
        text, has_ended = walker.walk(grammar, seed, "" if seed % 2 else "<|channel|>")
        pieces = read([text], is_forced=True)[1]
        calls = [piece for piece in pieces if isinstance(piece, CallDelta) and piece.is_last]
        for call in calls:
            assert fits(json.loads(call.arguments), SCHEMAS[str(call.name)])
        assert len(calls) <= 1
        assert calls or not (has_ended and is_required)
        num_calls += len(calls)
    assert num_calls


def test_the_grammar_takes_calls_of_the_functions_only(walker: Walker) -> None:
    head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    rules = CallRules(functions=FUNCTIONS[:1], tokens=walker.tokens)
    grammar = HarmonyCalls().grammar(rules)
    answer = "<|channel|>final<|message|>Rain."
    for text in (THOUGHT + head + ARGUMENTS, head + ARGUMENTS + "<|call|>", THOUGHT + answer):
        assert walker.takes(grammar, text), text
    for text in (head + "{}", head.replace("get_weather", "now") + "{}", "Rain.", THOUGHT, head + ARGUMENTS * 2):
        assert not walker.takes(grammar, text), text
    required = HarmonyCalls().grammar(CallRules(functions=FUNCTIONS[:1], is_required=True, tokens=walker.tokens))
    assert not walker.takes(required, answer)
    either = calls_or_answer(required, StructuredOutputs(choice=("yes",)), HarmonyCalls.answer_head)
    assert walker.takes(either, THOUGHT + head + ARGUMENTS)
    assert walker.takes(either, "<|channel|>final<|message|>yes")
    assert not walker.takes(either, answer)
