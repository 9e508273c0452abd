"""Adversarial token choices under a grammar: whatever is read as a call satisfies its schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quire.text.tokenizers.detokenizer import IncrementalDetokenizer
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tool_calls import CallDelta, CallParser, CallRules, Function, merge
from quire.text.tool_calls.grammar import text_tokens
from tests.text.tool_calls.markups import form_of
from tests.text.tool_calls.schema_check import fits
from tests.text.tool_calls.vocabulary import vocabulary

llguidance = pytest.importorskip("llguidance", reason="grammars are applied by llguidance")

SCHEMAS: dict[str, dict[str, Any]] = {
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "get": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FUNCTIONS = tuple(Function(name, schema) for name, schema in SCHEMAS.items())
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
FORMS = [("hermes", ""), ("llama3", ""), ("mistral", ""), ("mistral", "ids")]
# Special tokens that text leaves out, and tokens that it shows.
UNSEEN = ("<|x|>", "plain")
SEEN = ("<think>", "</think>", "[bar]", "<tool_response>", "<b>")
# Special tokens of which marks could be made. Where a grammar forces letters, llguidance's mask has such a token in
# place of its letters, and does not take it then (an engine has masks of its own there); so they are there only where
# marks are tokens.
PARTS = ("<tool", "call>", "_CALLS]", "[TOOL", "python_tag|>", "<|python", "d<|")
# Calls that no schema holds, as a model might try to write them.
WRONG = {
    "hermes": [
        '<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"city": "Oslo"}}</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "get", "arguments": {}}',
    ],
    "llama3": [
        '{"name": "now", "parameters": {"x": 1}}',
        ' {"type": "function", "name": "get", "parameters": {"city": "Oslo"}}',
        'So: <|python_tag|>{"name": "get", "parameters": {}}',
        '{"name": "now", "parameters": {}};{"name": "get", "arguments": {}}',
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "now", "arguments": {"x": 1}}]',
        'a [TOOL_CALLS] [{"name": "get", "arguments": {"city": "Oslo"}}, {"name": "get", "arguments": {}}]',
        '[TOOL_CALLS]now[ARGS]{"x": 1}',
        '[TOOL_CALLS]get{"city": "Oslo"}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{"x": 1}',
    ],
}


class World:
    """A vocabulary with tokens that are not shown, and parts of marks among them.

    Args:
        markers: of the format.
        kind: how the vocabulary has them: "special" or "plain" tokens, or "none".
    """

    def __init__(self, markers: Sequence[str], kind: str) -> None:
        unseen = UNSEEN if kind == "none" else (*UNSEEN, *PARTS)
        library, self.tokens = vocabulary(markers, kind, special=unseen, shown=SEEN)
        self.tokenizer = Tokenizer(library, eos_token="<|eos|>")
        assert self.tokenizer.eos_token_id is not None
        self.eos_id = self.tokenizer.eos_token_id
        vocab = library.get_vocab()
        self.others = [vocab[text] for text in (*unseen, *SEEN)]
        parts = () if kind == "none" else PARTS
        self._marks = self.tokens | {text: vocab[text] for text in parts}
        # As a model has them, ids without a token among them.
        self.num_ids = library.get_vocab_size() + 5
        self.matcher_tokenizer = llguidance.LLTokenizer(library.to_str(), n_vocab=self.num_ids, eos_token=self.eos_id)
        # Without the added tokens, so that marks can be spelled out.
        self._plain, _ = vocabulary((), "none")

    def letters(self, text: str) -> list[int]:
        """Write a text without any added token."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def spell(self, text: str, rng: random.Random) -> list[int]:
        """Write a text, marks and parts of them as their tokens or letter by letter."""
        ids: list[int] = []
        pos = 0
        while pos < len(text):
            marks = [mark for mark in self._marks if text.startswith(mark, pos)]
            if marks and rng.random() < 0.4:
                mark = rng.choice(marks)
                ids.append(self._marks[mark])
                pos += len(mark)
            else:
                length = rng.choice((1, 1, 1, 2, 5))
                ids += self.letters(text[pos : pos + length])
                pos += length
        return ids

    def wishes(self, wrong: Sequence[str], rng: random.Random) -> Iterator[int]:
        """Yield the tokens of a call that is none, with others between them."""
        share = rng.choice((0.0, 0.2, 0.4))
        for token_id in self.spell(rng.choice(("", "So ", "a\n")) + rng.choice(wrong), rng):
            while rng.random() < share:
                yield rng.choice(self.others)
            yield token_id

    def write(self, grammar: str, wishes: Iterator[int], rng: random.Random) -> tuple[list[int], bool]:
        """Return an output that has every wish that is allowed, and whether it came to its end."""
        matcher = llguidance.LLMatcher(self.matcher_tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids: list[int] = []
        for token_id in wishes:
            if self._is_allowed(matcher.compute_bitmask(), token_id):
                assert matcher.consume_token(token_id), matcher.get_error()
                ids.append(token_id)
        for _ in range(200):
            mask = matcher.compute_bitmask()
            if self._is_allowed(mask, self.eos_id):
                return ids, True
            allowed = [token_id for token_id in range(self.num_ids) if self._is_allowed(mask, token_id)]
            assert allowed, "a dead end"
            closing = [one for one in allowed if set(self.tokenizer.token_bytes(one)) & set(b'"}]')]
            token_id = rng.choice(closing or allowed)
            assert matcher.consume_token(token_id), matcher.get_error()
            ids.append(token_id)
        return ids, False

    def shown(self, ids: Sequence[int], *, shows_special: bool) -> str:
        """Return the text that a client gets."""
        special = self.tokenizer.special_ids
        kept = [token_id for token_id in self.tokens.values() if token_id in special]
        detokenizer = IncrementalDetokenizer(
            self.tokenizer, [7], skip_special_tokens=not shows_special, kept_special_ids=kept
        )
        return detokenizer.push(ids) + detokenizer.flush()

    @staticmethod
    def _is_allowed(mask: bytes, token_id: int) -> bool:
        return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


@pytest.fixture(scope="module")
def worlds() -> dict[tuple[str, str], World]:
    return {
        (name, kind): World(markers, kind) for name, markers in MARKERS.items() for kind in ("special", "plain", "none")
    }


@pytest.mark.parametrize("shows_special", [False, True])
@pytest.mark.parametrize("kind", ["special", "plain", "none"])
@pytest.mark.parametrize(("name", "markup"), FORMS)
@pytest.mark.pairwise
def test_no_tokens_write_a_call_that_no_schema_holds(
    name: str, markup: str, kind: str, shows_special: bool, worlds: dict[tuple[str, str], World]
) -> None:
    world, form = worlds[name, kind], form_of(name, markup)
    others = text_tokens(world.tokenizer, form.marker, world.num_ids)
    num_ended = num_calls = num_others = 0
    for seed in range(45):
        rng = random.Random(seed)
        rules = CallRules(
            functions=FUNCTIONS if seed % 5 else FUNCTIONS[:1],
            is_required=seed % 3 == 2,
            is_parallel=seed % 2 == 0,
            tokens=world.tokens,
            text_tokens=others,
        )
        ids, has_ended = world.write(form.grammar(rules), world.wishes(WRONG[name], rng), rng)
        text = world.shown(ids, shows_special=shows_special)
        parser = CallParser(form, rules.functions, is_forced=True)
        pieces = merge([*parser.push(text), *parser.finish()])
        calls = [piece for piece in pieces if isinstance(piece, CallDelta)]
        for call in calls[: None if has_ended else -1]:
            assert call.is_last, text
            assert call.name in {function.name for function in rules.functions}, text
            assert fits(json.loads(call.arguments), SCHEMAS[call.name]), text
        assert rules.is_parallel or len(calls) <= 1, text
        if rules.is_required and has_ended:
            assert calls, text
            assert all(isinstance(piece, CallDelta) for piece in pieces), text
        num_ended += has_ended
        num_calls += len(calls)
        num_others += bool(set(ids) & set(others))
    assert num_ended >= 30
    assert num_calls >= 15
    assert name == "llama3" or num_others >= 6


def test_tokens_of_which_a_mark_could_be_made_are_no_text(worlds: dict[tuple[str, str], World]) -> None:
    world = worlds["hermes", "special"]
    found = {world.tokenizer.token_text(one) for one in text_tokens(world.tokenizer, "<tool_call>", world.num_ids)}
    assert found >= {"<|x|>", "<think>", "</think>", "<tool_response>", "plain", "[TOOL"}
    assert not found & {"<tool", "call>", "<tool_call>", "[bar]", "<|eos|>"}
    assert all(one < 5 for one in text_tokens(world.tokenizer, "<tool_call>", 5))


def test_other_tokens_stand_anywhere_but_behind_a_part_of_a_mark(worlds: dict[tuple[str, str], World]) -> None:
    world, form = worlds["hermes", "special"], form_of("hermes")
    (unseen,) = [one for one in world.others if world.tokenizer.token_text(one) == "<|x|>"]
    grammar = form.grammar(CallRules(functions=FUNCTIONS, tokens=world.tokens, text_tokens=(unseen,)))

    def takes(*parts: str | int) -> bool:
        ids = [one for part in parts for one in ([part] if isinstance(part, int) else world.letters(part))]
        matcher = llguidance.LLMatcher(world.matcher_tokenizer, grammar)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    mark = "<tool_call>"
    assert takes(unseen, "a < b", unseen, unseen, "<tools>", unseen, mark[1:], unseen)
    assert takes("a", unseen, '<tool_call>\n{"name": "now", "arguments": {}}\n', world.tokens["</tool_call>"], unseen)
    for length in range(1, len(mark)):
        assert not takes(mark[:length], unseen), mark[:length]
        assert takes(f"{mark[:length]} ", unseen), mark[:length]
