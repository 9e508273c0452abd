"""Every markup: calls of templates, random calls, cuts, and a grammar that agrees with the reader."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.text.tool_calls import CallDelta, CallParser, CallRules, Function, merge
from quire.text.tool_calls.calls import Piece
from quire.text.tool_calls.detection import TRIALS, accepts
from quire.text.tool_calls.formats import FORMATS, MarkupFormat
from quire.text.tool_calls.markup import CallObject, KeywordArguments, TaggedArguments
from tests.text.tool_calls.markup_examples import COHERE, EXAMPLES, GIVEN, JSON
from tests.text.tool_calls.markup_writer import MARKUPS, Calls, write
from tests.text.tool_calls.schema_check import fits
from tests.text.tool_calls.test_grammars import Walker

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "n": {"type": "null"},
        "l": {"type": "array"},
        "o": {"type": "object", "additionalProperties": True},
        "año": {"type": "integer"},
        "any": {},
    },
}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = (Function("look", SCHEMA), Function("look-2", NO_ARGUMENTS))
SCHEMAS = {function.name: function.parameters for function in FUNCTIONS}


# A markup for each form of arguments, and those with marks of their own kind.
QUICK = {
    *("apertus-0", "cohere-0", "deepseek-1", "deepseek_v32-0", "functionary_v32-0", "functiongemma-0", "glm-1"),
    *("granite-0", "hunyuan-1", "kimi_k2-0", "llama3-0", "longcat-0", "mirothinker-0", "mistral-4", "olmo3-0"),
    *("pythonic-0", "seed_oss-0"),
}
# Templates indent JSON, grammars have it on one line.
INDENTED = {"command_r-0"}
ALL = [key if key in QUICK else pytest.param(key, marks=pytest.mark.slow) for key in EXAMPLES]


def read(form: MarkupFormat, parts: list[str], *, is_forced: bool = False) -> list[Piece]:
    parser = CallParser(form, FUNCTIONS, is_forced=is_forced)
    return merge([piece for part in parts for piece in parser.push(part)] + parser.finish())


# Arguments that the schema does not allow.
UNFIT: list[dict[str, Any]] = [
    *({"i": "x"}, {"b": "so"}, {"n": 5}, {"l": {}}, {"o": [1]}, {"other": 1}, {"s": "a", "i": 5.5}),
]


def calls_of(pieces: list[Piece]) -> list[tuple[str | None, Any]]:
    """Return names and arguments of complete calls; nothing else may be there."""
    assert all(isinstance(piece, CallDelta) and piece.is_last for piece in pieces), pieces
    return [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, CallDelta)]


def test_each_markup_has_an_example() -> None:
    assert EXAMPLES.keys() == MARKUPS.keys()
    for form in FORMATS.values():
        if isinstance(form, MarkupFormat):
            assert len({markup.begin for markup in form.markups}) == 1


@pytest.mark.parametrize("key", EXAMPLES)
def test_calls_of_templates_are_read_wherever_they_are_cut(key: str) -> None:
    form, text = MARKUPS[key], EXAMPLES[key]
    expected = [("look", GIVEN), ("look-2", {})][: 1 if "look-2" not in text else 2]
    for is_forced in (False, True):
        whole = read(form, [text], is_forced=is_forced)
        assert calls_of(whole) == expected
        assert read(form, list(text), is_forced=is_forced) == whole
    # Any markup of a format reads the calls of the others.
    for other in form.markups:
        assert calls_of(read(form.led_by(other), [text])) == expected


@pytest.mark.slow
@pytest.mark.parametrize("key", EXAMPLES)
def test_every_cut_gives_the_same_calls(key: str) -> None:
    form, text = MARKUPS[key], EXAMPLES[key]
    for is_forced in (False, True):
        whole = read(form, [text], is_forced=is_forced)
        for cut in range(1, len(text)):
            assert read(form, [text[:cut], text[cut:]], is_forced=is_forced) == whole


@pytest.mark.parametrize("key", EXAMPLES)
def test_text_before_calls_is_content(key: str) -> None:
    form = MARKUPS[key]
    text = EXAMPLES[key] if EXAMPLES[key].startswith(form.marker) else form.marker + EXAMPLES[key]
    content, *calls = read(form, ["I look.\n", text])
    assert content == "I look."
    assert [name for name, _ in calls_of(calls)][:1] == ["look"]


@pytest.mark.parametrize("key", EXAMPLES)
def test_a_call_of_another_function_is_content(key: str) -> None:
    text = EXAMPLES[key].replace("look", "drop")
    assert read(MARKUPS[key], [text]) == [text]
    assert read(MARKUPS[key], list(text)) == [text]


LETTERS = st.text("abc 5\n\t\"'\\<>/{}[](),:=é🦄", max_size=12) | st.sampled_from(["true", "None", "5", "{}", "[1]"])
NUMBERS = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False, width=32)
NESTED = st.recursive(
    st.none() | st.booleans() | NUMBERS | LETTERS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["p", "q_1", "ñ_Z"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": LETTERS,
        "i": st.integers(-(10**12), 10**12),
        "x": NUMBERS,
        "b": st.booleans(),
        "n": st.none(),
        "año": st.integers(0, 9999),
        "l": st.lists(NESTED, max_size=3),
        "o": st.dictionaries(st.sampled_from(["p", "q_1", "ñ_Z"]), NESTED, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.just("look"), ARGUMENTS) | st.just(("look-2", {})), min_size=1, max_size=3)


def can_say(form: MarkupFormat, calls: Calls) -> bool:
    """Return whether a format has a spelling for the strings of calls: some have no escapes."""
    arguments = form.markups[0].arguments
    text = repr(calls)
    if isinstance(arguments, TaggedArguments):
        return arguments.value_end.strip() not in text
    return (
        not isinstance(arguments, KeywordArguments) or not arguments.values.quote or arguments.values.quote not in text
    )


@settings(max_examples=60)
@given(key=st.sampled_from(sorted(MARKUPS)), calls=CALLS, data=st.data())
def test_random_calls_are_read_back(key: str, calls: Calls, data: st.DataObject) -> None:
    form = MARKUPS[key]
    assume(can_say(form, calls))
    text = write(form.markups[0], calls)
    cut = data.draw(st.integers(0, len(text)))
    for is_forced in (False, True):
        whole = read(form, [text], is_forced=is_forced)
        assert calls_of(whole) == [(name, arguments) for name, arguments in calls]
        assert read(form, list(text), is_forced=is_forced) == whole
        assert read(form, [text[:cut], text[cut:]], is_forced=is_forced) == whole


class ByteWalker:
    """Grammars over single bytes."""

    def __init__(self) -> None:
        llguidance = pytest.importorskip("llguidance", reason="grammars are applied by llguidance")
        self.library = llguidance
        self.tokenizer = llguidance.LLTokenizer("byte")

    def matcher(self, grammar: str) -> Any:
        matcher = self.library.LLMatcher(self.tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def takes(self, grammar: str, text: str) -> bool:
        raw = list(text.encode())
        matcher = self.matcher(grammar)
        return bool(matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting())

    def walk(self, grammar: str, begin: str, rng: random.Random, most: int = 400) -> tuple[str, bool]:
        """Return a random output, and whether it came to its end."""
        matcher, raw = self.matcher(grammar), list(begin.encode())
        assert matcher.try_consume_tokens(raw) == len(raw), begin
        while len(raw) < most:
            if matcher.is_accepting() and rng.random() < 0.3:
                return bytes(raw).decode(errors="ignore"), True
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
            if not allowed:
                return bytes(raw).decode(errors="ignore"), matcher.is_accepting()
            ending = [byte for byte in allowed if byte in b'"}])<|\n']
            plain = [byte for byte in allowed if 32 <= byte < 127] or allowed
            byte = rng.choice(ending if ending and rng.random() < 0.4 else plain)
            assert matcher.consume_token(byte), matcher.get_error()
            raw.append(byte)
        return bytes(raw).decode(errors="ignore"), False


@pytest.fixture(scope="module")
def walker() -> ByteWalker:
    return ByteWalker()


@pytest.mark.parametrize("key", ALL)
def test_grammars_take_the_calls_of_templates_and_no_others(key: str, walker: ByteWalker) -> None:
    form = MARKUPS[key]
    text = write(form.markups[0], [("look", GIVEN), ("look-2", {})]) if key in INDENTED else EXAMPLES[key]
    has_two, content = "look-2" in text, f"{form.content_begin}It rains."
    marked = text if text.startswith(form.marker) else form.marker + text + form.markups[0].end
    free = form.grammar(CallRules(functions=FUNCTIONS))
    required = form.grammar(CallRules(functions=FUNCTIONS, is_required=True))
    single = form.grammar(CallRules(functions=FUNCTIONS, is_parallel=False))
    assert walker.takes(free, text)
    assert walker.takes(free, f"{content}{marked}")
    assert walker.takes(required, text)
    assert walker.takes(single, text) != has_two
    assert walker.takes(free, content)
    assert not walker.takes(required, content)
    assert not walker.takes(required, f"{content}{marked}")
    for wrong in (marked.replace("look", "drop"), marked[: marked.index("look")], form.marker, f"{form.marker} so"):
        assert not walker.takes(free, f"{form.content_begin}{wrong}"), wrong
    for unfit in UNFIT:
        assert not walker.takes(required, write(form.markups[0], [("look", unfit)])), unfit


@pytest.mark.parametrize("key", ALL)
def test_random_outputs_under_a_grammar_are_read_as_calls_that_fit(key: str, walker: ByteWalker) -> None:
    form, rng = MARKUPS[key], random.Random(key)
    num_ended = 0
    for round_idx in range(6):
        is_required = round_idx % 2 == 0
        rules = CallRules(functions=FUNCTIONS, is_required=is_required)
        begin = "" if is_required else f"{form.content_begin}{rng.choice(['', 'So: '])}{form.marker}"
        text, has_ended = walker.walk(form.grammar(rules), begin, rng)
        forced = read(form, [text], is_forced=True)
        calls = [piece for piece in forced if isinstance(piece, CallDelta)]
        for call in calls[: None if has_ended else -1]:
            assert call.name in SCHEMAS
            assert call.is_last, text
            assert fits(json.loads(call.arguments), SCHEMAS[call.name]), text
        if has_ended:
            assert calls, text
            assert read(form, [text]) == forced, text
        num_ended += has_ended
    assert num_ended >= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["special", "none"])
@pytest.mark.parametrize("key", EXAMPLES)
def test_outputs_with_marks_as_tokens_are_read_as_calls_that_fit(key: str, kind: str) -> None:
    form = MARKUPS[key]
    walker = Walker(form.markups[0].marks, kind)
    num_ended = 0
    for seed in range(18):
        if seed >= 6 and num_ended >= 2:  # the calls of some formats are long, and few end
            break
        is_required = seed % 2 == 0
        begin = "" if is_required else f"{form.content_begin}{form.marker}"
        rules = CallRules(functions=FUNCTIONS, is_required=is_required, tokens=walker.tokens)
        text, has_ended = walker.walk(form.grammar(rules), seed, begin)
        forced = read(form, [text], is_forced=True)
        calls = [piece for piece in forced if isinstance(piece, CallDelta)]
        for call in calls[: None if has_ended else -1]:
            assert call.name in SCHEMAS
            assert fits(json.loads(call.arguments), SCHEMAS[call.name]), text
        if has_ended:
            assert calls, text
            assert read(form, [text]) == forced, text
        num_ended += has_ended
    assert num_ended >= 2


@pytest.mark.parametrize("key", ["lfm2-0", "olmo3-0", "pythonic-0", "seed_oss-0"])
def test_strings_between_single_quotes_have_no_escapes(key: str, walker: ByteWalker) -> None:
    texts = {"enum": ["it's", "a\\b", "plain"]}
    quotes = {"type": "array", "items": {"pattern": "^'$"}}
    schema = {"properties": {"v": {"type": "array", "items": texts}, "w": quotes}}
    function = Function("look", schema, is_strict=True)
    grammar = MARKUPS[key].grammar(CallRules(functions=[function], is_required=True))
    markup = MARKUPS[key].markups[0]
    markup = replace(markup, begin="", end="") if markup.may_be_bare else markup
    assert walker.takes(grammar, write(markup, [("look", {"v": texts["enum"], "w": ["'"]})]))
    plain = write(markup, [("look", {"v": ["plain"]})])
    assert walker.takes(grammar, plain.replace('"plain"', "'plain'"))
    for wrong in ("'it's'", "'it\\'s'", "'a\\\\b'", "'other'"):
        assert not walker.takes(grammar, plain.replace('"plain"', wrong)), wrong


def test_lists_and_objects_in_pythons_syntax_are_read_if_the_schema_allows_them() -> None:
    form = MARKUPS["seed_oss-0"]
    text = write(
        form.markups[0], [("look", {"l": "[1, 'x', False]", "o": "{'p': None}", "s": "['x']", "any": "[', ]"})]
    )
    ((_, arguments),) = calls_of(read(form, [text]))
    assert arguments == {"l": [1, "x", False], "o": {"p": None}, "s": "['x']", "any": "[', ]"}


def test_ids_of_other_fields_are_left_out_of_arguments() -> None:
    (call,) = read(MARKUPS["cohere-0"], [EXAMPLES["cohere-0"].replace(f",\n    {COHERE[1]}", "")])
    assert isinstance(call, CallDelta)
    assert call.arguments == JSON
    assert isinstance(MARKUPS["cohere-0"].markups[0].arguments, CallObject)


def test_a_text_that_only_begins_contents_is_left_out(walker: ByteWalker) -> None:
    form = MARKUPS["functionary_v32-0"]
    for is_forced in (False, True):
        for parts in (["all\nIt rains."], list("all\nIt rains.")):
            assert read(form, parts, is_forced=is_forced) == ["It rains."]
        called = read(form, list("all\nI look.\n>>>look-2\n{}"), is_forced=is_forced)
        assert called == ["I look.", CallDelta(0, "look-2", "{}", is_last=True)]
    assert read(form, ["It rains."]) == ["It rains."]
    free = form.grammar(CallRules(functions=FUNCTIONS))
    assert not walker.takes(free, "It rains.")
    assert walker.takes(free, "all\nlook\n{}")


def test_the_mark_between_bare_calls_begins_none() -> None:
    (trial,) = [trial for trial in TRIALS if len(trial.calls) == 2]
    text = ">>>".join(f"{name}\n{json.dumps(arguments)}" for name, arguments in trial.calls)
    assert accepts(MARKUPS["functionary_v32-0"], trial, text)
    assert not accepts(MARKUPS["functionary_v32-0"], trial, text.replace("\n", " "))
