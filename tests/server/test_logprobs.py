"""Log probabilities in the forms of completions and of chat."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.outputs.logprobs import FlatLogprobs, PromptLogprobs
from quire.sequences.logprobs import TokenLogprobs
from quire.server.generation.logprob_fields import (
    LOWEST_LOGPROB,
    TextOffsets,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs_json,
)
from quire.server.http.json_stream import JsonWriter
from quire.text.tokenizers.tokenizer import Tokenizer


def measured(token_id: int, logprob: float, rank: int, top: Sequence[tuple[int, float]]) -> TokenLogprobs:
    ids, logprobs = zip(*top, strict=True)
    return TokenLogprobs(token_id, logprob, rank, array("i", ids), array("d", logprobs))


def flat(*positions: TokenLogprobs) -> FlatLogprobs:
    rows = FlatLogprobs()
    for position in positions:
        rows.append(position)
    return rows


def written(value: Any) -> Any:
    """Return a value as a client reads it."""
    return json.loads("".join(JsonWriter(ascii_only=False).parts(value)))


def test_four_parallel_arrays_always_with_the_chosen_token(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(char, add_special_tokens=False)[0] for char in "abc")
    prompt = PromptLogprobs(flat(measured(a, -3.0, 9, ((b, -0.5), (c, -1.5)))))
    output = flat(measured(b, -0.5, 1, ((b, -0.5), (c, -1.0))))
    arrays = written(completion_logprobs([c, a, b], [prompt, output], [0, 1, 2], 2, TokenNames(tokenizer, by_id=False)))
    assert arrays["tokens"] == ["c", "a", "b"]
    assert arrays["token_logprobs"] == [None, -3.0, -0.5]
    assert arrays["top_logprobs"] == [None, {"a": -3.0, "b": -0.5, "c": -1.5}, {"b": -0.5, "c": -1.0}]
    assert arrays["text_offset"] == [0, 1, 2]


def test_zero_logprobs_show_the_chosen_token_only(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(char, add_special_tokens=False)[0] for char in "ab")
    rows = flat(measured(a, -3.0, 9, ((b, -0.5),)))
    arrays = written(completion_logprobs([a], [rows], [0], 0, TokenNames(tokenizer, by_id=False)))
    assert arrays["top_logprobs"] == [{"a": -3.0}]


def test_of_equal_logprobs_the_chosen_token_comes_first(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(char, add_special_tokens=False)[0] for char in "abc")
    names = TokenNames(tokenizer, by_id=False)
    top = ((a, -1.0), (b, -1.0), (c, -1.0))
    for chosen, expected in ((a, "ab"), (b, "ba"), (c, "ca")):
        (entry,) = written(chat_logprobs(flat(measured(chosen, -1.0, 1, top)), 2, names))["content"]
        assert "".join(other["token"] for other in entry["top_logprobs"]) == expected


def test_minus_infinity_is_a_number_in_json(tokenizer: Tokenizer) -> None:
    rows = flat(measured(5, -math.inf, 300, ((6, -0.1),)))
    names = TokenNames(tokenizer, by_id=False)
    assert written(completion_logprobs([5], [rows], [0], 1, names))["token_logprobs"] == [LOWEST_LOGPROB]
    assert written(chat_logprobs(rows, 1, names))["content"][0]["logprob"] < -999


def test_chat_entries_carry_bytes_that_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "na\u00efve \U0001f600!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    rows = flat(*(measured(token_id, -0.5, 1, ((token_id, -0.5), (token_id + 1, -1.0))) for token_id in ids))
    content = written(chat_logprobs(rows, 1, TokenNames(tokenizer, by_id=False)))["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
    assert all([top["token"] for top in entry["top_logprobs"]] == [entry["token"]] for entry in content)
    assert "\ufffd" not in "".join(entry["token"] for entry in content)
    escaped = [entry for entry in content if entry["token"].startswith("\\x")]
    assert escaped
    assert all(bytes.fromhex(entry["token"].replace("\\x", "")) == bytes(entry["bytes"]) for entry in escaped)


def test_a_token_inside_a_character_is_written_as_bytes(tokenizer: Tokenizer) -> None:
    (first, *_) = tokenizer.encode("\u0f40", add_special_tokens=False)
    assert TokenNames(tokenizer, by_id=False, bytes_prefix="bytes:").name(first) == "bytes:\\xe0"
    assert TokenNames(tokenizer, by_id=True).name(first) == f"token_id:{first}"
    assert TokenNames(None, by_id=False).name(first) == f"token_id:{first}"


@given(st.text(st.characters(codec="utf-8"), max_size=30), st.booleans())
def test_offsets_are_where_each_token_begins_in_the_text(tokenizer: Tokenizer, text: str, with_special: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=with_special)
    expected, data = [], b""
    for token_id in ids:
        piece = b"" if with_special and token_id == 0 and not data else tokenizer.token_bytes(token_id)
        # The characters that are begun before this token; it belongs to the last of them where it continues it.
        begun = sum(byte & 0xC0 != 0x80 for byte in data)
        expected.append(begun - bool(piece and piece[0] & 0xC0 == 0x80))
        data += piece
    assert data.decode() == text
    assert list(TextOffsets(tokenizer).over_prompt(ids, text)) == expected
    if not with_special:
        assert list(TextOffsets(tokenizer).over_output(ids, skip_special_tokens=False)) == expected


def test_offsets_continue_after_the_prompt_without_skipped_tokens(tokenizer: Tokenizer) -> None:
    prompt = "ab<|user|>"
    ids = tokenizer.encode(prompt)
    assert ids[0] == 0
    offsets = TextOffsets(tokenizer)
    # The prompt as it was sent shows its special token; the one that the tokenizer put before it is not there.
    assert list(offsets.over_prompt(ids, prompt)) == [0, 0, 1, 2]
    x = tokenizer.encode("x", add_special_tokens=False)[0]
    assert list(offsets.over_output([x, 1, x], skip_special_tokens=True)) == [10, 11, 11]
    assert list(offsets.over_output([1, x], skip_special_tokens=False)) == [12, 12 + len("<|eos|>")]


def test_prompt_logprobs_hold_the_prompts_own_token_and_the_likeliest(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(char, add_special_tokens=False)[0] for char in "abc")
    rows = PromptLogprobs(flat(measured(a, -3.0, 9, ((b, -0.5), (c, -1.5)))))
    first, second = written(prompt_logprobs_json(rows, 1, TokenNames(tokenizer, by_id=False)))
    assert first is None
    assert second == {
        str(a): {"logprob": -3.0, "rank": 9, "decoded_token": "a"},
        str(b): {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
    }
