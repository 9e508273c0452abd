"""Random walks under a grammar are read as calls whose arguments fit their schema."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from quire.errors import InvalidParameter
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tool_calls import CallDelta, CallParser, CallRules, Function, ToolFormat, merge
from quire.text.tool_calls.formats import DEEPSEEK
from quire.text.tool_calls.harmony import HarmonyCalls
from tests.text.tool_calls.markups import form_of
from tests.text.tool_calls.schema_check import fits
from tests.text.tool_calls.vocabulary import vocabulary

llguidance = pytest.importorskip("llguidance", reason="grammars are applied by llguidance")

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NESTED = {
    "properties": {
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{1,8}$"}]},
    },
    "required": ["points"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "ok": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
ANYTHING: dict[str, Any] = {}
SCHEMAS = {"get_weather": WEATHER, "get_weather2": NESTED, "now": NOTHING, "note-it": ANYTHING}
FUNCTIONS = tuple(Function(name, schema) for name, schema in SCHEMAS.items())
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "qwen3_xml": ("<tool_call>", "</tool_call>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "deepseek": DEEPSEEK.marks,
    "harmony": HarmonyCalls.other_markers,
}
FORMS = [
    ("hermes", ""),
    ("llama3", ""),
    ("mistral", ""),
    ("mistral", "named"),
    ("mistral", "ids"),
    *(
        pytest.param(*form, marks=pytest.mark.slow)
        for form in [("qwen3_xml", ""), ("gemma4", ""), ("lfm2", ""), ("deepseek", ""), ("deepseek", "fenced")]
    ),
]


class Walker:
    """Writes outputs under a grammar, one allowed token after the other.

    Args:
        markers: of the format.
        kind: how the tokenizer has them: "special" or "plain" tokens, or "none".
    """

    def __init__(self, markers: Sequence[str], kind: str) -> None:
        library, self.tokens = vocabulary(markers, kind, shown=["<think>"])
        self.tokenizer = Tokenizer(library, eos_token="<|eos|>")
        vocab = library.get_vocab()
        self.eos_id, self.think_id = vocab["<|eos|>"], vocab["<think>"]
        self.library = library
        self.matcher_tokenizer = llguidance.LLTokenizer(library.to_str(), eos_token=self.eos_id)

    def matcher(self, grammar: str) -> Any:
        matcher = llguidance.LLMatcher(self.matcher_tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def encode(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids

    def text(self, ids: Sequence[int]) -> str:
        # What a server shows: markers stay, the end token goes.
        raw = b"".join(self.tokenizer.token_bytes(token_id) for token_id in ids if token_id != self.eos_id)
        return raw.decode(errors="ignore")  # a cut output may end inside a character

    def walk(self, grammar: str, seed: int, begin: str, num_tokens: int = 300) -> tuple[str, bool]:
        """Return an output and whether it came to its end."""
        rng = random.Random(seed)
        matcher = self.matcher(grammar)
        ids = self.encode(begin)
        assert matcher.consume_tokens(ids), matcher.get_error()
        for _ in range(num_tokens):
            allowed = self.allowed(matcher)
            assert allowed, "a dead end"
            if self.eos_id in allowed and rng.random() < 0.3:
                return self.text(ids), True
            marks = [token_id for token_id in self.tokens.values() if token_id in allowed]
            closing = [token_id for token_id in allowed if set(self.tokenizer.token_bytes(token_id)) & set(b'"}]')]
            options = marks if marks and rng.random() < 0.3 else allowed
            if closing and rng.random() < 0.4:
                options = closing
            token_id = rng.choice(options)
            ids.append(token_id)
            if token_id == self.eos_id:
                return self.text(ids), True
            assert matcher.consume_token(token_id), matcher.get_error()
        return self.text(ids), False

    def allowed(self, matcher: Any) -> list[int]:
        mask = matcher.compute_bitmask()
        return [token_id for token_id in range(self.tokenizer.vocab_size) if mask[token_id >> 3] >> (token_id & 7) & 1]

    def takes(self, grammar: str, text: str) -> bool:
        """Tell whether a whole text can be written."""
        ids = self.encode(text)
        matcher = self.matcher(grammar)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.fixture(scope="module")
def walkers() -> dict[tuple[str, str], Walker]:
    return {
        (name, kind): Walker(markers, kind)
        for name, markers in MARKERS.items()
        for kind in ("special", "plain", "none")
    }


def parse(form: ToolFormat, text: str, *, is_forced: bool) -> tuple[str, list[CallDelta]]:
    parser = CallParser(form, FUNCTIONS, is_forced=is_forced)
    pieces = merge([*parser.push(text), *parser.finish()])
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, CallDelta)]


def check(form: ToolFormat, text: str, has_ended: bool, rules: CallRules) -> list[CallDelta]:
    """Check an output's calls and return them."""
    content, calls = parse(form, text, is_forced=True)
    names = {function.name for function in rules.functions}
    for call in calls[: None if has_ended else -1]:
        assert call.name in names
        assert call.is_last, text
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        assert fits(arguments, SCHEMAS[call.name]), text
    assert rules.is_parallel or len(calls) <= 1
    if has_ended:
        # Nothing but the grammar says where a call is; read without it, the output has the same ones.
        assert parse(form, text, is_forced=False) == (content, calls)
        assert form.marker not in content
        if rules.is_required:
            assert calls
            assert not content
    return calls


@pytest.mark.parametrize("kind", ["special", "plain", "none"])
@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize(("name", "markup"), FORMS)
@pytest.mark.pairwise
def test_required_outputs_are_calls_and_nothing_else(
    name: str, markup: str, is_parallel: bool, kind: str, walkers: dict[tuple[str, str], Walker]
) -> None:
    walker, form = walkers[name, kind], form_of(name, markup)
    rules = CallRules(functions=FUNCTIONS, is_required=True, is_parallel=is_parallel, tokens=walker.tokens)
    grammar = form.grammar(rules)
    seen, num_ended = set(), 0
    for seed in range(12):
        text, has_ended = walker.walk(grammar, seed, "")
        calls = check(form, text, has_ended, rules)
        seen |= {call.name for call in calls}
        num_ended += has_ended
    assert num_ended >= 6
    assert len(seen) >= 3
    (only,) = (function for function in FUNCTIONS if function.name == "now")
    rules = CallRules(functions=(only,), is_required=True, is_parallel=False, tokens=walker.tokens)
    text, has_ended = walker.walk(form.grammar(rules), 1, "")
    (call,) = check(form, text, has_ended, rules)
    assert (call.name, call.arguments) == ("now", "{}")


@pytest.mark.parametrize("kind", ["special", "plain", "none"])
@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize(("name", "markup"), FORMS)
@pytest.mark.pairwise
def test_once_a_marker_is_there_a_call_must_follow(
    name: str, markup: str, is_parallel: bool, kind: str, walkers: dict[tuple[str, str], Walker]
) -> None:
    walker, form = walkers[name, kind], form_of(name, markup)
    rules = CallRules(functions=FUNCTIONS, is_parallel=is_parallel, tokens=walker.tokens)
    grammar = form.grammar(rules)
    num_calls = num_ended = 0
    for seed in range(12):
        begin = ["", "I will look.\n", form.marker, f"So: {form.marker}"][seed % 4]
        text, has_ended = walker.walk(grammar, seed, begin)
        calls = check(form, text, has_ended, rules)
        assert calls or form.marker not in begin
        num_calls += len(calls)
        num_ended += has_ended
    assert num_calls >= 6
    assert num_ended >= 6


@pytest.mark.parametrize("kind", ["special", "plain", "none"])
@pytest.mark.parametrize(("name", "markup"), FORMS)
def test_free_text_is_free(name: str, markup: str, kind: str, walkers: dict[tuple[str, str], Walker]) -> None:
    walker, form = walkers[name, kind], form_of(name, markup)
    grammar = form.grammar(CallRules(functions=FUNCTIONS, tokens=walker.tokens, text_tokens=(walker.think_id,)))
    texts = ["", "plain text", 'a {"name": "get_weather"', '{"a": 1}', '{"name": "Bob", "age": 5}', "[1] <tool 🦄\n\n"]
    if name != "llama3":
        texts += ['{"name": "get_weather"}', "<think>so</think>", "<think>"]
    for text in texts:
        assert walker.takes(grammar, text), text
    for text in (f"{form.marker} x", form.marker, f"a{form.marker}"):
        assert not walker.takes(grammar, text), text


def test_a_bare_call_of_llama_is_held_to_its_schema(walkers: dict[tuple[str, str], Walker]) -> None:
    walker, form = walkers["llama3", "special"], form_of("llama3", "")
    grammar = form.grammar(CallRules(functions=FUNCTIONS, tokens=walker.tokens))
    good = '{"city": "Paris", "days": 3}'
    for begin in ('{"name": "get_weather", "parameters": ', ' {"type": "function", "name":"get_weather","parameters":'):
        assert walker.takes(grammar, f"{begin}{good}}}")
        assert walker.takes(grammar, f'{begin}{good}}};{{"name": "now", "parameters": {{}}}}')
        assert not walker.takes(grammar, f"{begin}{good}}} so")
        for bad in ('{"city": "Paris"}', '{"days": 3}', "{}", "[]", '{"city": "Paris", "days": 15}'):
            assert not walker.takes(grammar, f"{begin}{bad}}}"), bad


@pytest.mark.parametrize(("name", "markup"), FORMS)
def test_a_strict_function_refuses_a_schema_that_cannot_be_held_to(name: str, markup: str) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\bfox\b"}}, "required": ["a"]}
    form = form_of(name, markup)
    with pytest.raises(InvalidParameter, match=r"properties\.a: pattern cannot .* a word boundary") as refused:
        form.grammar(CallRules(functions=[Function("paint", odd, is_strict=True, field="x")], is_required=True))
    assert (refused.value.field, refused.value.value) == ("x", odd)
    assert form.grammar(CallRules(functions=[Function("paint", odd)], is_required=True))


def test_a_schema_cannot_change_how_it_is_written() -> None:
    rules = CallRules(functions=(Function("f", {"x-guidance": {"lenient": True, "item_separator": ".*"}}, True),))
    grammar = form_of("hermes").grammar(rules)
    assert '"item_separator": ", "' in grammar
    assert '.*"' not in grammar
    assert "lenient" not in grammar


def test_what_only_people_read_is_left_out_of_a_schema() -> None:
    note = {"description": "for people", "title": "for people", "default": "for people"}
    whole = {**note, "properties": {"description": {"type": "string", **note}}, "$defs": {"title": note}}
    grammar = form_of("hermes").grammar(CallRules(functions=[Function("f", whole)]))
    assert "for people" not in grammar
    assert '"properties": {"description": {"type": "string"}}' in grammar


def test_ids_of_other_tokens_become_ranges() -> None:
    rules = CallRules(functions=FUNCTIONS, tokens={"<tool_call>": 12}, text_tokens=(9, 10, 12, 14, 11, 30))
    assert "<[9-11,14,30]>" in form_of("hermes").grammar(rules)


@pytest.mark.parametrize("name", ["qwen3_xml", "gemma4", "lfm2"])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"required": 5}, "required is a list of strings, got 5"),
        ({"properties": {"x": {"type": "foo"}}}, "type is one of array, boolean, .*, got 'foo'"),
        ({"properties": {"x": {"type": "array", "minItems": "2"}}}, "minItems is an integer from 0 on, got '2'"),
        ({"properties": {"x": {"type": "string", "maxLength": -1}}}, "maxLength is an integer from 0 on, got -1"),
        ({"properties": {"x": {"enum": []}}}, "enum is a list that is not empty"),
        ({"properties": {"x": {"anyOf": [{"type": "object", "properties": [1]}]}}}, "properties is an object"),
        ({"properties": {"x": {"type": "integer", "minimum": "a"}}}, "minimum is a number, got 'a'"),
    ],
)
def test_a_schema_that_is_none_is_refused_by_formats_without_json(name: str, wrong: Any, reason: str) -> None:
    schema = {"type": "object", **wrong}
    function = Function("bad", schema, field="tools[1].function.parameters")
    with pytest.raises(InvalidParameter, match=f"a JSON schema that compiles: .*{reason}") as refused:
        form_of(name).grammar(CallRules(functions=[*FUNCTIONS, function]))
    assert (refused.value.field, refused.value.value) == (function.field, schema)
    left_out = {"type": "object", "required": None, "properties": {"x": {"type": "string", "enum": None}}}
    assert form_of(name).grammar(CallRules(functions=[Function("good", left_out)]))
