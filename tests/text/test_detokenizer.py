"""What was pushed and flushed is what decoding everything at once gives, and it comes as early as it can."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.tokenizers.detokenizer import IncrementalDetokenizer
from quire.text.tokenizers.tokenizer import Tokenizer

NAMES = ["byte_level", "byte_fallback", "word_piece", "metaspace"]
TEXTS = st.text(
    st.sampled_from("aeé e\u0301你好世🎉👩\u200d👧\n\t.,'▁the  \u0000\u00ad\u07ff\u0800\uffff\U0010ffff")
    | st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
)


def stream(tokenizer: Tokenizer, prompt: list[int], chunks: list[list[int]], *, skip: bool) -> str:
    """Push the chunks one after the other."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return "".join([detokenizer.push(chunk) for chunk in chunks]) + detokenizer.flush()


def draw_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Draw tokens at random: texts, special tokens, lone bytes, ids without a token."""
    anything = st.integers(0, tokenizer.vocab_size + 2).map(lambda token_id: [token_id])
    special = st.sampled_from(sorted(tokenizer.special_ids)).map(lambda token_id: [token_id])
    text = TEXTS.map(lambda value: tokenizer.encode(value, add_special_tokens=False))
    parts = data.draw(st.lists(st.one_of(anything, anything, special, text), max_size=12))
    return [token_id for part in parts for token_id in part]


def in_chunks(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """Cut the tokens as speculative decoding might."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    edges = [0, *cuts, len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


def draw_prompt(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Draw a prompt that does not end inside a character."""
    prompt = draw_ids(data, tokenizer)
    end = data.draw(st.sampled_from(["whole", "empty", "special"]))
    if end == "whole":
        return prompt + tokenizer.encode("a", add_special_tokens=False)
    return [] if end == "empty" else [min(tokenizer.special_ids)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "byte_fallback"])
@given(data=st.data(), skip=st.booleans())
@settings(deadline=None, max_examples=150)
def test_any_tokens_give_what_decoding_all_at_once_gives(
    every_tokenizer: dict[str, Tokenizer], name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = every_tokenizer[name]
    prompt, output = draw_prompt(data, tokenizer), draw_ids(data, tokenizer)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert before + stream(tokenizer, prompt, in_chunks(data, output), skip=skip) == whole


def repaired(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[int]:
    """Write what is not UTF-8 in each run of byte tokens as replacement characters, from the first fault on."""
    replacement = tokenizer.encode("\ufffd", add_special_tokens=False)
    result: list[int] = []
    run: list[int] = []

    def close() -> None:
        raw = b"".join(tokenizer.token_bytes(token_id) for token_id in run)
        try:
            whole = len(raw.decode().encode())
        except UnicodeDecodeError as error:
            whole = error.start
        result.extend(run[:whole] + replacement[-1:] * (len(run) - whole))
        run.clear()

    for token_id in ids:
        if tokenizer.token_text(token_id) == "" or (skip and token_id in tokenizer.special_ids):
            continue
        if tokenizer.pieces[token_id].is_fallback_byte:
            run.append(token_id)
        else:
            close()
            result.append(token_id)
    close()
    return result


@given(data=st.data(), skip=st.booleans())
@settings(deadline=None, max_examples=200)
def test_any_byte_tokens_keep_the_characters_before_a_fault(
    byte_fallback: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    prompt, output = draw_prompt(data, byte_fallback), draw_ids(data, byte_fallback)
    before = byte_fallback.decode(repaired(byte_fallback, prompt, skip=skip), skip_special_tokens=skip)
    whole = byte_fallback.decode(repaired(byte_fallback, prompt + output, skip=skip), skip_special_tokens=skip)
    assert before + stream(byte_fallback, prompt, in_chunks(data, output), skip=skip) == whole


@given(data=st.data(), skip=st.booleans())
@settings(deadline=None, max_examples=200)
def test_mixed_valid_and_invalid_byte_runs_equal_decode(
    byte_fallback: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    def as_bytes(raw: bytes) -> list[int]:
        return [byte_fallback.encode("<unk>", add_special_tokens=False)[0] + 4 + byte for byte in raw]

    texts = TEXTS.map(lambda value: as_bytes(value.encode()))
    faulty = st.binary(max_size=6).map(lambda raw: as_bytes(b"\xff" + raw))
    cut_off = st.sampled_from([b"\xe4", b"\xe4\xbd", b"\xf0\x9f\x8e", b"\xc3"]).map(as_bytes)
    word = byte_fallback.encode("the", add_special_tokens=False)
    runs = data.draw(st.lists(st.one_of(texts, faulty, cut_off), max_size=8))
    output = [token_id for run in runs for token_id in run + word]
    whole = byte_fallback.decode(word + output, skip_special_tokens=skip)
    assert "the" + stream(byte_fallback, word, in_chunks(data, output), skip=skip) == whole


def complete(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode a piece of a text that holds no replacement character of its own, up to its last whole character."""
    return tokenizer.decode(repaired(tokenizer, ids, skip=False), skip_special_tokens=False).rstrip("\ufffd")


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(data=st.data(), text=TEXTS)
@settings(deadline=None, max_examples=150)
def test_a_character_comes_with_its_last_token_and_not_before(
    every_tokenizer: dict[str, Tokenizer], name: str, data: st.DataObject, text: str
) -> None:
    tokenizer = every_tokenizer[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    start = data.draw(st.integers(0, len(ids)))
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:start], skip_special_tokens=False)
    so_far = complete(tokenizer, ids[:start])
    for idx in range(start, len(ids)):
        so_far += detokenizer.push(ids[idx : idx + 1])
        assert so_far == complete(tokenizer, ids[: idx + 1])
    assert detokenizer.flush() == ""
    assert so_far == tokenizer.decode(ids, skip_special_tokens=False)


def test_half_a_character_is_replaced_only_at_the_end(byte_level: Tokenizer) -> None:
    head = [token_id for token_id in range(byte_level.vocab_size) if byte_level.token_bytes(token_id) == b"\xe4"]
    detokenizer = IncrementalDetokenizer(byte_level, [], skip_special_tokens=True)
    assert detokenizer.push(head[:1]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_some_special_tokens_can_be_kept(every_tokenizer: dict[str, Tokenizer]) -> None:
    for tokenizer in every_tokenizer.values():
        kept, left_out = tokenizer.added_ids["<|end|>"], tokenizer.added_ids["<s>"]
        ids = [left_out, kept, *tokenizer.encode("a", add_special_tokens=False), kept]
        detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True, kept_special_ids=[kept])
        text = detokenizer.push(ids) + detokenizer.flush()
        assert text == tokenizer.decode(ids[1:], skip_special_tokens=False)
        assert text.count("<|end|>") == 2


def test_a_replacement_character_that_was_meant_is_not_held_back(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, [], skip_special_tokens=True)
    assert detokenizer.push(byte_level.encode("\ufffd", add_special_tokens=False)) == "\ufffd"


class CountingLibrary:
    """The real library, counting the tokens that it is asked to decode."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def decode(self, ids: list[int], **options: bool) -> str:
        self.num_decoded += len(ids)
        text: str = self.library.decode(ids, **options)
        return text


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_of_a_token_does_not_grow_with_the_text(every_tokenizer: dict[str, Tokenizer], name: str) -> None:
    library = CountingLibrary(every_tokenizer[name]._library)
    tokenizer = Tokenizer(library)  # type: ignore[arg-type]
    vocabulary = list(range(tokenizer.vocab_size))
    prompt = vocabulary * 10
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=False)
    num_for_prompt = library.num_decoded
    detokenizer.push(vocabulary)
    num_for_all = library.num_decoded
    detokenizer.push(vocabulary * 10)
    assert num_for_prompt <= 3 * 8
    assert num_for_all <= 3 * (len(vocabulary) + 8)
    assert library.num_decoded == num_for_all
