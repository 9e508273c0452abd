"""Regular expressions of schemas: what they match stays, and what no grammar has is named."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from quire.sequences.structured import GrammarSource
from quire.text.schemas.document import SchemaError
from quire.text.schemas.patterns import other_than, to_rust
from tests.schemas.random_schemas import PATTERNS, SLASHED


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a$", "a"),
        ("a", "(?s:.*)a(?s:.*)"),
        ("^a|b$", "a(?s:.*)|(?s:.*)b"),
        ("(?:^|,)a(?:,|$)", "(?:|(?s:.*),)a(?:,(?s:.*)|)"),
        ("^$", ""),
        (r"^\d{2}\/\d{2}$", r"[0-9]{2}\/[0-9]{2}"),
        ("^[/]$", r"[\/]"),
        ("^{a}$", r"\{a\}"),
        ("^a]}$", r"a\]\}"),
        (r"^[a-z&&[^b]$", r"[a-z\&\&\[\^b]"),
        (r"^[^\d]$", r"[^\p{Nd}]"),
        (r"^\u0041\x42\cJ\0$", r"AB\x{a}\x{0}"),
        (r"^\ud83d\ude00$", r"\x{1f600}"),
        ("^\N{GRINNING FACE}$", r"\x{1f600}"),
        ("^(?<year>a)(?P<b>c)$", "(?:a)(?:c)"),
        ("^a{2,}?b*?$", "a{2,}b*"),
        ("^[^]$", "(?s:.)"),
        (r"^\p{L}[\p{Lu}-]$", r"\p{L}[\p{Lu}\-]"),
        ("(?i)^a$", "(?i)a"),
        ("^(?i:a)$", "(?i:a)"),
    ],
)  # fmt: skip
def test_an_expression_matches_whole_texts_in_rusts_syntax(pattern: str, expected: str) -> None:
    assert to_rust(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)", "has a look-ahead"),
        ("^(?!a)b", "has a look-ahead"),
        ("(?<=a)b", "has a look-behind"),
        (r"\bfox\b", "has a word boundary"),
        (r"(a)\1", "has a back-reference"),
        (r"(?<n>a)\k<n>", "has a back-reference"),
        ("a^b", "has an anchor that is not at one of its ends"),
        ("a(^b|c)", "has an anchor that is not at one of its ends"),
        ("(a$|b)c", "has an anchor that is not at one of its ends"),
        ("(^a)*", "repeats an anchor"),
        ("(", "has a bracket that is not closed"),
        (")", "has a bracket too many"),
        ("[a", "has a class that is not closed"),
        ("[]", "has an empty class"),
        ("[z-a]", "has the range z-a"),
        ("*a", r"has nothing before \*"),
        ("a**", "has two quantifiers in a row"),
        ("a{3,2}", "has the quantifier"),
        ("a{99999999999}", "has the quantifier"),
        ("a{,3}", "has a quantifier without its first number"),
        (r"\Aab\Z", r"has the escape \\A"),
        (r"\ud83d", "has half of a surrogate pair"),
        ("(?x)a", "has a group of an unknown kind"),
        ("a(?i)b", "sets a flag in its middle"),
        ("\\", r"has the escape \\"),
        ("(" * 200 + ")" * 200, "nests too deeply"),
    ],
)
def test_what_no_grammar_has_is_named(pattern: str, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        to_rust(pattern)


@pytest.mark.parametrize("pattern", [*PATTERNS, *SLASHED, r"\S\W\D", r"^[^\w\s]{2}$", "^.$", r"^[\s]+$", "(?i)ab"])
def test_texts_that_are_written_match_the_original(pattern: str) -> None:
    walks = pytest.importorskip("tests.schemas.walks")
    matcher = walks.compiled(GrammarSource("json", json.dumps({"type": "string", "pattern": pattern})))
    rng, num_seen = Random(pattern), 0
    for _ in range(12):
        text = walks.walk(matcher, rng)
        if text is not None:
            assert re.search(pattern, json.loads(text)), text
            num_seen += 1
    # A text that may begin anyhow seldom comes to what it needs.
    assert num_seen >= 8 or not pattern.startswith("^")


@pytest.mark.parametrize("names", [["a"], ["a", "ab", "b"], [""], ["x", "", "xyz"], ["a+b", "é"]])
def test_other_texts_are_all_but_some(names: list[str]) -> None:
    pattern = re.compile(other_than(names).replace("\\x{e9}", "é"))
    texts = {"", "a", "b", "ab", "abc", "x", "xy", "xyz", "xyzz", "a+b", "aab", "é", "éé", "\n", "b\n"}
    assert {text for text in texts if pattern.fullmatch(text)} == texts - set(names)
    with pytest.raises(SchemaError, match="are long"):
        other_than(["x" * 1000])
