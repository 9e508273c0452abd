"""Rules of tools' grammars that do not compile, or have no text, are replaced where the grammar says by what."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

import llguidance

from quire.sequences.structured import OR_ELSE, GrammarSource
from quire.text.structured.compiled_grammar import compile_grammar
from quire.text.tool_calls import CallRules, Function
from tests.text.tool_calls.markups import form_of

NEVER = {"type": "string", "pattern": "^a$", "minLength": 3}
UNKNOWN = {"type": "string", "pattern": r"^\p{Foo}$"}


def grammar(*rules: str) -> GrammarSource:
    return GrammarSource("grammar", "\n".join(["%llguidance {}", *rules, ""]))


def takes(source: GrammarSource, text: str) -> bool:
    matcher, raw = compile_grammar(llguidance.LLTokenizer("byte"), source), list(text.encode())
    return bool(matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting())


def test_a_rule_that_does_not_compile_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    source = grammar(
        "start: a b", f"a: /(?=x)/{OR_ELSE}a: /x+/", f"b: T{OR_ELSE}b: never", f"T: /y/ & /z/{OR_ELSE}T: /y+/"
    )
    with caplog.at_level(logging.WARNING):
        assert takes(source, "xxyy")
    assert len(caplog.messages) == 2
    assert "look-around" in caplog.messages[0]
    assert "no text meets /y/ & /z/" in caplog.messages[1]
    assert all("1 |" not in message for message in caplog.messages)
    assert not takes(source, "xz")


@pytest.mark.parametrize("rule", [f"a: /(?=x)/{OR_ELSE}", f"a: A\nA: /y/ & /z/{OR_ELSE}", "a: /(?=x)/"])
def test_a_rule_without_another_one_makes_an_error(rule: str) -> None:
    with pytest.raises(ValueError, match=r"^at [34]\(\d+\): "):
        compile_grammar(llguidance.LLTokenizer("byte"), grammar("start: a", rule))


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "gemma4", "lfm2"])
@pytest.mark.parametrize("odd", [NEVER, UNKNOWN])
def test_one_tool_takes_no_other_down(name: str, odd: dict[str, object]) -> None:
    form = form_of(name)
    good = Function("good", {"type": "object", "properties": {"v": {"enum": [5]}}, "required": ["v"]})
    bad = {"type": "object", "properties": {"w": odd}, "required": ["w"]}
    loose = GrammarSource("grammar", form.grammar(CallRules(functions=[good, Function("bad", bad)], is_required=True)))
    call = {
        "hermes": '<tool_call>\n{{"name": "{}", "arguments": {{"{}": {}}}}}\n</tool_call>',
        "qwen3_xml": "<tool_call>\n<function={}>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>",
        "gemma4": "<|tool_call>call:{}{{{}:{}}}<tool_call|>",
        "lfm2": "<|tool_call_start|>[{}({}={})]<|tool_call_end|>",
    }[name]
    text = {"hermes": '"zz"', "qwen3_xml": "zz", "gemma4": '<|"|>zz<|"|>', "lfm2": '"zz"'}[name]
    assert takes(loose, call.format("good", "v", 5))
    assert not takes(loose, call.format("good", "v", 6))
    assert takes(loose, call.format("bad", "w", text))
    strict = Function("bad", bad, is_strict=True)
    held = GrammarSource("grammar", form.grammar(CallRules(functions=[good, strict], is_required=True)))
    with pytest.raises(ValueError, match="at "):
        compile_grammar(llguidance.LLTokenizer("byte"), held)
