"""Ordinary schemas, expressions and choices that compile beside tools in every format of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

import llguidance

from quire.sequences.structured import GrammarSource, StructuredOutputs
from quire.text.structured.compiled_grammar import compile_grammar
from quire.text.tool_calls import CallRules, Function
from quire.text.tool_calls.grammar import calls_or_answer
from tests.text.tool_calls.markups import form_of

FORMS = ("hermes", "llama3", "deepseek", "harmony", "qwen3_xml", "gemma4", "lfm2")
# By what is ordinary in them: properties of a tool, and its required ones.
SCHEMAS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a required key that is not declared": ({"city": {"enum": ["Paris", "Rome"]}}, ["city", "unit"]),
    "one inside": ({"at": {"type": "object", "properties": {"x": {}}, "required": ["y"]}}, ["at"]),
    "one item": ({"tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 1}}, []),
    "an escaped slash": ({"day": {"type": "string", "pattern": r"^\d{2}\/\d{2}$"}}, []),
    "what restricts nothing": ({"v": {"type": "array", "uniqueItems": False, "maxItems": 2.0, "minContains": 1}}, []),
    "an unknown format": ({"v": {"type": "string", "format": "password"}}, []),
}


def rules(schema: dict[str, Any]) -> CallRules:
    return CallRules(functions=[Function("f", schema, is_strict=True)], is_required=True)


def takes(source: GrammarSource, text: str) -> bool:
    matcher, raw = compile_grammar(llguidance.LLTokenizer("byte"), source), list(text.encode())
    return bool(matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_strict_tool_compiles(name: str, kind: str) -> None:
    properties, required = SCHEMAS[kind]
    schema = {"type": "object", "properties": properties, "required": required}
    compile_grammar(llguidance.LLTokenizer("byte"), GrammarSource("grammar", form_of(name).grammar(rules(schema))))


@pytest.mark.parametrize("name", FORMS)
def test_an_expression_has_slashes_with_and_without_an_escape(name: str) -> None:
    form = form_of(name)
    calls = form.grammar(rules({"type": "object"}))
    for regex in (r"\d{2}\/\d{2}", r"\d{2}/\d{2}", r"\d{2}[\/]\d{2}"):
        text = calls_or_answer(calls, StructuredOutputs(regex=regex), "")
        assert takes(GrammarSource("grammar", text), "12/34")
        assert not takes(GrammarSource("grammar", text), r"12\/34")


def test_a_choice_may_have_any_character() -> None:
    choices = [f"a{chr(code)}b" for code in (*range(33), *range(126, 162), 0x2028, 0xFEFF, 0x1F600)] + ['"', "\\", "/"]
    source = GrammarSource("choice", json.dumps(choices, ensure_ascii=False))
    assert all(takes(source, choice) for choice in choices)
    assert not takes(source, "a")
