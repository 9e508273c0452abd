"""GBNF: characters by code, names that Lark does not tell apart, and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

import llguidance

from quire.sequences.structured import GrammarSource
from quire.text.structured.compiled_grammar import compile_grammar
from quire.text.structured.gbnf import as_lark, is_gbnf


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (r'root ::= "caf\u00e9ba"', ["caféba"]),
        (r'root ::= "\u0041bcd"', ["Abcd"]),
        (r"root ::= [\u00e0-\u00ff]{2}", ["àÿ"]),
        (r'root ::= "\U0001F600\x41\x7f\x09"', ["\N{GRINNING FACE}A\x7f\t"]),
        (r'root ::= "a\"\\\n\t\[x\]"', ['a"\\\n\t[x]']),
        (r'root ::= [^\x41\]"/&-]', ["b", "é", "["]),
        ('root ::= "x" start\nstart ::= "y"', ["xy"]),
        ('root ::= ab AB aB\nab ::= "1"\nAB ::= "2"\naB ::= "3"', ["123"]),
        ('root ::= a-b a_b\na-b ::= "1"\na_b ::= "2"', ["12"]),
        ('# root of "all\nroot ::= item{2,3} # no "quote\nitem ::= [a-c]+ ("," | ";")?', ["a,b;c", "ab,c"]),
        ('root ::= r1 r2\nr1 ::= "1"\nr2 ::= root2\nroot2 ::= "2"', ["12"]),
        (r"root ::= [a&&b~] [+--]", ["&+", "~-", "b,"]),
    ],
)
def test_the_characters_that_are_written_are_meant(grammar: str, texts: list[str]) -> None:
    assert is_gbnf(grammar)
    matcher = compile_grammar(llguidance.LLTokenizer("byte"), GrammarSource("grammar", grammar))
    for text in texts:
        output, raw = matcher.deep_copy(), list(text.encode())
        assert output.try_consume_tokens(raw) == len(raw), text
        assert output.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start ::= "a"', "there is no rule root"),
        ("root ::= item", "there is no rule item"),
        (r'root ::= "\ud800"', "is no character"),
        ('root ::= "a" )', "read as GBNF"),
    ],
)
def test_what_is_no_gbnf_is_told(grammar: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        as_lark(grammar)


@pytest.mark.parametrize("grammar", ['start: "::=" x\nx: "a"', "%llguidance {}\nstart: /[a-z]+/"])
def test_lark_is_left_as_it_is(grammar: str) -> None:
    assert not is_gbnf(grammar)
