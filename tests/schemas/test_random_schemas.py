"""Random schemas as answers, open and closed, and as tools of every format of calls.

Each is enforced, so that every output is valid to the package `jsonschema`, or refused for a reason that is true. What
JSON can say of a schema, the other formats can say too.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from quire.errors import InvalidParameter
from quire.sequences.structured import GrammarSource
from quire.text.schemas.forms import ANY, Anything, Array, NormalSchema, Object
from quire.text.schemas.normal import normalise
from quire.text.tool_calls.argument_schema import argument_schema
from quire.text.tool_calls.value_grammar import ABILITIES
from tests.schemas.random_schemas import SCALARS, WORDS, SchemaMaker
from tests.schemas.refusals import NOT_ENFORCED
from tests.text.tool_calls.markups import form_of

walks = pytest.importorskip("tests.schemas.walks")
FORMS = {
    "hermes": "", "llama3": "", "mistral": "named", "deepseek": "", "harmony": "",
    "qwen3_xml": "", "gemma4": "", "lfm2": "",
}  # fmt: skip
WITHOUT_JSON = ("qwen3_xml", "gemma4", "lfm2")
# Of the formats with JSON, one is walked: they differ in what is around the arguments. Of the others each schema has
# one in turn.
WALKED = ("hermes", *WITHOUT_JSON)
OTHERS = [name for name in FORMS if name not in WALKED]
NUM_SCHEMAS = 3000
PART = 60
PARTS = [pytest.param(start, marks=() if start == 0 else pytest.mark.slow) for start in range(0, NUM_SCHEMAS, PART)]
# By words of a reason: what the schema has then.
REASONS: dict[str, str] = {
    "has a look-": r"\(\?",
    "has a word boundary": r"\\\\b",
    "has a back-reference": r"\\\\1",
    "has an anchor that": r"a\^b",
    "has a bracket that is not closed": r'"pattern": "\("',
    "names another document": r"https://example\.com",
    "no part of the schema is": "nowhere",
    "does not compare items": '"uniqueItems": true',
    "does not look for an item": '"contains"',
    "does not see a name that comes twice": '"(minProperties|not)"',
    "declared and not required are not counted": '"(maxProperties|not)"',
    "opposite of its schema": '"(not|if)"',
    "may meet several of its schemas": '"oneOf"',
    "only lists of names": '"propertyNames"',
    "no patterns here": '"(patternProperties|propertyNames)"',
    "has too many digits": '"(multipleOf|const|enum)"',
    "there is no expression of regex": '"regex"',
    "another part has patterns": '"patternProperties"',
    "whether a pattern beside it matches": '"patternProperties"',
}


def check_reason(reason: str, schema: dict[str, Any]) -> str:
    """Check that a schema has what it is refused for, and return the kind of the reason."""
    text = json.dumps(schema, ensure_ascii=False)
    found = NOT_ENFORCED.search(reason)
    if found is not None:
        assert f'"{found["keyword"]}"' in text, reason
        ((words, pattern),) = [each for each in REASONS.items() if each[0] in found["why"]]
        assert re.search(pattern, text), reason
        return words
    if "are not disjoint" in reason:
        assert '"patternProperties"' in text
        return "not disjoint"
    if "nsatisfiable" in reason or "no text meets" in reason:
        # Expressions without a common text, and properties that a pattern is about too, which the compiler compares.
        assert re.search('"(pattern|format|patternProperties)"', text), reason
        return "no text"
    assert "no value meets it" in reason, reason
    # None of many values of the right shape is valid.
    valid = [value for value in candidates(schema, Random(reason)) if walks.is_valid(json.dumps(value), schema)]
    assert not valid, (reason, valid[:1])
    return "no value"


def candidates(schema: dict[str, Any], rng: Random) -> Iterator[dict[str, Any]]:
    """Yield objects with properties that a schema names somewhere, and values that are often right."""
    text = json.dumps(schema)
    names = sorted({*re.findall(r'"([^"\\]*)": (?:\{|true)', text), *schema.get("required", ())})
    values: list[Any] = [
        *SCALARS,
        *WORDS,
        5,
        20,
        [],
        {},
        ["kg"],
        [1],
        {"a": 1},
        "12:00:00Z",
        "a@b",
        "red",
        "x",
        "2024-01-01",
    ]
    for size in range(5):
        for _ in range(60):
            chosen = {*rng.sample(names, min(size, len(names))), *schema.get("required", ())}
            yield {name: rng.choice(values) for name in chosen}


def asks_for_no_further_names(schema: NormalSchema) -> bool:
    forms = [form for state in range(2, len(schema.states)) for form in schema.forms(state)]
    objects = [form for form in forms if isinstance(form, Object)]
    arrays = [form for form in forms if isinstance(form, Array)]
    # Any value may be an object with any names.
    values = {state for form in objects for _, state in form.properties}
    values |= {state for form in arrays for state in (*form.prefix, form.items)}
    takes_any = ANY in values or any(isinstance(form, Anything) for form in forms)
    return not takes_any and not any(schema.forms(form.additional) or form.patterns for form in objects)


@pytest.mark.parametrize("start", PARTS)
def test_a_schema_is_enforced_or_refused_for_a_true_reason(start: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(start, start + PART):
        schema, rng = SchemaMaker(seed).schema(), Random(seed)
        for is_closed in (False, True):
            check_answer(schema, is_closed, rng, seen)
        strict: dict[str, Any] = {}
        for name in (*WALKED, OTHERS[seed % len(OTHERS)]):
            strict[name] = check_tool(name, schema, rng, seen, is_strict=True)
            # The same rules where nothing is left out, so a sample of those is enough.
            if strict[name] is None or rng.random() < 0.25:
                check_tool(name, schema, rng, seen, is_strict=False)
        check_parity(schema, strict, rng, seen)
    assert seen["answers"] > PART
    assert seen["calls"] > 2 * PART
    assert seen["cut"] < 0.3 * seen["calls"]
    assert seen["rewritten"] > PART
    assert seen["refused"] < 4 * PART


def check_answer(schema: dict[str, Any], is_closed: bool, rng: Random, seen: Counter[str]) -> None:
    source = GrammarSource("json", json.dumps(schema), is_closed=is_closed)
    try:
        matcher = walks.compiled(source)
    except ValueError as error:
        seen[check_reason(str(error), schema)] += 1
        return
    for _ in range(2):
        text = walks.walk(matcher, rng)
        if text is not None:
            assert walks.is_valid(text, schema), (text, schema)
            seen["answers"] += 1


def check_tool(name: str, schema: dict[str, Any], rng: Random, seen: Counter[str], *, is_strict: bool) -> Any:
    """Check one call, and return the matcher of calls; None where the schema is refused."""
    form = form_of(name, FORMS[name])
    try:
        matcher, function = walks.call_matcher(form, schema, is_strict=is_strict)
    except (InvalidParameter, ValueError) as error:
        if not is_strict:  # it is never refused for what no grammar can enforce
            raise
        check_reason(error.allowed if isinstance(error, InvalidParameter) else str(error), schema)
        seen["refused"] += 1
        return None
    if name not in WALKED:
        return matcher
    text = walks.walk(matcher, rng)
    if text is None:
        seen["cut"] += 1
        return matcher
    arguments = walks.read_call(form, text, function)
    abilities = ABILITIES if name in WITHOUT_JSON else None
    if is_strict:
        assert not argument_schema(function, abilities).dropped
        assert walks.is_valid(arguments, schema), (text, schema)
    seen["calls"] += 1
    return matcher


def check_parity(schema: dict[str, Any], strict: dict[str, Any], rng: Random, seen: Counter[str]) -> None:
    """Check that calls whose arguments are JSON can be written in the other formats."""
    hermes, matcher = form_of("hermes"), strict["hermes"]
    others = {name: strict[name] for name in WITHOUT_JSON}
    if matcher is None or None in others.values():
        return
    closed = normalise({"type": "object", **schema}, is_closed=True, is_strict=True)
    # Names that are not declared have other spellings there.
    if not asks_for_no_further_names(closed):
        return
    for _ in range(3):
        text = walks.walk(matcher, rng)
        arguments = "" if text is None else walks.read_call(hermes, text, walks.function_of(schema, is_strict=True))
        # Python writes some numbers otherwise, and marks would end a string.
        if not arguments or re.search(r"[0-9][eE.]|\\u|<[|/]", arguments):
            continue
        texts = [value for value in json.loads(arguments).values() if isinstance(value, str)]
        for name, other in others.items():
            # There a string begins otherwise than values of other types that are allowed.
            if name == "qwen3_xml" and any(re.match(r"\s*([-\[{0-9]|true|false|null)", value) for value in texts):
                continue
            written = walks.written_call(name, json.loads(arguments))
            assert walks.writes(other, written), (name, written, schema)
            seen["rewritten"] += 1


def test_a_checked_reason_can_be_wrong() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for reason in (
        "no value meets it",
        "properties.a: pattern cannot be enforced, since the regular expression has a look-ahead",
    ):
        with pytest.raises(AssertionError):
            check_reason(reason, schema)
    assert not walks.is_valid('{"a": 1}', schema)
    assert not walks.is_valid('{"a": 1, "a": "x"}', schema)
