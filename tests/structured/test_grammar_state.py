"""Grammar states that go forwards, backwards, fork and take drafts, against constraints built anew."""

from __future__ import annotations

import ctypes
import json
import random
import re

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire.sequences.structured import GrammarSource, StructuredOutputs
from quire.text.structured.compiled_grammar import MAX_FORCED_BYTES, compile_grammar, import_llguidance
from quire.text.structured.grammar_state import DEAD_END, MAX_RUN, GrammarState
from tests.structured.grammar_world import (
    END,
    NUM_IDS,
    NUM_WORDS,
    VOCAB,
    WANTED,
    allowed,
    compiled,
    constraint_of,
    filled,
    fresh,
    grammar_state,
    new_sequence,
    text,
    tokenizer,
    walk,
)

NAMES = sorted(WANTED)


def check(name: str, said: str) -> None:
    """Check a whole output against what was wanted, without a grammar."""
    if name in ("schema", "compact"):
        value = json.loads(said)
        if name == "schema":
            assert list(value) == ["name", "n"]
            assert value["name"] in ("ab", "true")
            assert type(value["n"]) is int
            assert value["n"] <= 120
            assert not re.search(r"[^\n ]  |\n *\n", said), "one space, or one new line with its indentation"
        else:
            assert said == json.dumps(value, separators=(",", ":"))
            assert type(value["name"]) is bool
            assert len(value["ab"]) <= 3
    elif name == "choice":
        assert said in WANTED[name]["choice"]
    else:
        pattern = {"regex": WANTED["regex"].get("regex"), "grammar": "name(ab)*12[.]", "dead": "c"}[name]
        assert re.fullmatch(str(pattern), said)


@pytest.mark.parametrize("name", NAMES)
def test_random_walks_give_what_was_wanted(name: str) -> None:
    rng = random.Random(1)
    said = set()
    for _ in range(60):
        output = walk(name, rng, 200)
        known = fresh(name, output)
        rows = filled(known)
        if known.error is None and END in rows[0]:
            said.add(text(output))
    for one in said:
        check(name, one)
    assert len(said) > 1 or name == "dead"


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_a_position_gives_the_same_masks(name: str) -> None:
    rng = random.Random(2)
    known = grammar_state(name)
    for _ in range(150):
        # Sometimes it goes on from where it is, sometimes tokens of another output come.
        wanted = walk(name, rng, rng.randrange(1, 12))
        common = next((i for i, (a, b) in enumerate(zip(known.token_ids, wanted, strict=False)) if a != b), 0)
        start = min(common, rng.randrange(len(wanted) + 1))
        known.sync(start, wanted[start:])
        if rng.random() < 0.3:
            assert known.is_prefix_of([*wanted, 1])
            assert known.is_prefix_of(wanted)
            assert not known.is_prefix_of(wanted[:-1])
            assert not known.is_prefix_of([*wanted[:-1], wanted[-1] + 1])
            known = known.fork(constraint_of(new_sequence(name)))
        twin = fresh(name, wanted)
        assert known.token_ids == wanted == twin.token_ids
        assert filled(known) == filled(twin)
        assert known.error == twin.error
        if known.error is not None:
            known = grammar_state(name)


@pytest.mark.parametrize("name", NAMES)
def test_masks_behind_drafts_are_those_of_drafts_that_came_true(name: str) -> None:
    rng = random.Random(3)
    for _ in range(60):
        whole = walk(name, rng, 14)
        cut = rng.randrange(len(whole) + 1)
        draft = whole[cut:]
        spoilt = rng.random() < 0.4 and bool(draft)
        if spoilt:
            place = rng.randrange(len(draft))
            draft[place] = rng.choice([END, *range(NUM_IDS)])
        known = fresh(name, whole[:cut])
        rows = filled(known, tuple(draft))
        expected = []
        for length in range(len(draft) + 1):
            twin = grammar_state(name)
            twin.sync(0, whole[:cut] + draft[:length])
            one = filled(twin) if twin.error is None else []
            if not one:
                break
            expected += one
        assert rows == expected
        assert (known.error is None) == bool(rows), "a dead end in drafts is no error of the output"
        assert filled(known) == rows[:1], "it is where it was"
        assert known.token_ids == whole[:cut]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_appended_is_what_would_have_been_drawn(name: str) -> None:
    rng = random.Random(4)
    num_free = 0
    for seed in range(40):
        output: list[int] = []
        drawn_at = set()
        known = grammar_state(name)
        rng.seed(seed)
        while True:
            (tokens,) = filled(known) or [set()]
            if not tokens:
                assert known.error == DEAD_END
                break
            drawn = rng.choice(sorted(tokens))
            drawn_at.add(len(output))
            run = known.append((drawn,))
            assert run[0] == drawn
            output += run
            num_free += len(run) - 1
            if output[-1] == END or len(output) > 60:
                break
        # One position at a time, where no token is drawn there was no other.
        twin = grammar_state(name)
        for place, token_id in enumerate(output):
            (tokens,) = filled(twin)
            assert token_id in tokens
            assert place in drawn_at or tokens == {token_id}
            if token_id != END:
                twin.sync(place, [token_id])
    if name in ("compact", "grammar", "choice"):
        assert num_free > 20


def test_forced_text_is_written_as_the_tokenizer_writes_it() -> None:
    known = grammar_state("compact")
    run = known.append((VOCAB.index("{"),))
    written = tokenizer().encode('{"name":').ids
    assert list(run[: len(written) - 1]) == written[:-1], "the last token might go on"
    assert len(run) > 1


def test_forced_runs_are_single_tokens_beside_processors_and_logprobs() -> None:
    brace = VOCAB.index("{")
    assert len(grammar_state("compact").append((brace,))) > 1
    for params in (
        {"bad_words": ["a"]},
        {"allowed_token_ids": [1]},
        {"logits_processors": [lambda *_: None]},
        {"min_tokens": 1, "stop_token_ids": [3]},
        {"logprobs": 1},
    ):
        known = grammar_state("compact", **params)
        assert known.append((brace,)) == (brace,)
        assert [len(row) for row in filled(known)] == [1]


def test_the_end_is_forced_where_there_is_one_end_and_it_may_come() -> None:
    output = tuple(tokenizer().encode("names are true").ids)
    assert grammar_state("choice").append(output)[-1] == END
    assert grammar_state("choice", min_tokens=len(output)).append(output)[-1] == END
    assert grammar_state("choice", min_tokens=len(output) + 1).append(output) == output, "a dead end comes of that"
    ends = (END, 1)
    constraint = constraint_of(new_sequence("choice"))
    assert constraint.source is not None
    either = GrammarState(compiled(constraint.source, ends), constraint, ends)
    assert either.append(output) == output
    assert filled(either) == [{0, 1}]


def test_a_dead_end_is_an_error_of_its_own_and_stays_one() -> None:
    known = grammar_state("dead")
    token = VOCAB.index("a")
    known.sync(0, [token] * 6)
    assert filled(known) == []
    assert known.error == DEAD_END
    known.sync(0, [])
    assert filled(known) == []
    assert known.fork(constraint_of(new_sequence("dead"))).error == DEAD_END


def test_tokens_that_the_grammar_does_not_have_are_an_error() -> None:
    known = grammar_state("choice")
    known.sync(0, [VOCAB.index("{")])
    assert known.error == DEAD_END


def test_a_mask_has_a_bit_for_each_id() -> None:
    assert NUM_IDS % 32
    (row,) = filled(grammar_state("dead"))
    assert row == {VOCAB.index(token) for token in ("a", "b", "c", "ab")}
    assert allowed(b"\0" * 7 + b"\x80") == {63}


def test_long_forced_text_is_drawn_until_the_rest_is_short() -> None:
    num_pairs = MAX_FORCED_BYTES // 2 + 4
    grammar = compiled(GrammarSource("regex", f"b|(ab){{{num_pairs}}}"))
    known = GrammarState(grammar, constraint_of(new_sequence("regex")), (END,))
    pair = VOCAB.index("ab")
    num_drawn = 0
    while len(run := known.append((pair,))) == 1:
        num_drawn += 1
        assert pair in filled(known)[0]
    left = 2 * (num_pairs - num_drawn - 1)
    assert left == MAX_FORCED_BYTES
    assert run == (pair,) * (1 + MAX_RUN)


@pytest.mark.parametrize("source", [one.source for one in (StructuredOutputs(**WANTED[name]) for name in NAMES)])
def test_slices_change_no_mask(source: GrammarSource) -> None:
    rng = random.Random(7)
    text = str(tokenizer().to_str())
    plain = import_llguidance().LLTokenizer(text, n_vocab=NUM_IDS, eos_token=[END], slices=[])
    one, other = compile_grammar(plain, source), compiled(source).open()
    for _ in range(30):
        rows = [bytearray(4 * NUM_WORDS), bytearray(4 * NUM_WORDS)]
        for row, matcher in zip(rows, (one, other), strict=True):
            matcher.unsafe_compute_mask_ptr(ctypes.addressof(ctypes.c_char.from_buffer(row)), len(row))
        assert rows[0] == rows[1]
        tokens = sorted(allowed(bytes(rows[0])) - {END})
        if not tokens:
            break
        token_id = rng.choice(tokens)
        assert one.try_consume_tokens([token_id]) == other.try_consume_tokens([token_id]) == 1
