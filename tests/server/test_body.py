"""JSON bodies: what is refused, and how."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from quire.platform.bounded.json_text import MANY_INTEGERS, MAX_DEPTH, MAX_DIGITS, MAX_VALUES, limit_digits
from quire.server.requests.body import MAX_LONG_BODIES, BodyReader
from quire.server.requests.errors import ApiError

MAX_INTEGERS = 100_000

BAD = {
    "empty": b"",
    "cut off": b'{"prompt": "a',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "NaN": b'{"temperature": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "lone high surrogate": rb'{"prompt": "\ud800"}',
    "lone low surrogate in a key": rb'{"\uDC00": 1}',
    "too deep": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a number of 5,000 digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "an array": b"[]",
    "a string": b'"{}"',
    "null": b"null",
    "a boolean": b"true",
    "a number": b"1",
    "two values": b"{} {}",
    "a trailing comma": b'{"a": 1,}',
    "966 levels": b'{"a":' + b"[" * 966 + b"]" * 966 + b"}",
    "a level too many": b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    "a level too many, of objects": b'{"a":' * MAX_DEPTH + b"{}" + b"}" * MAX_DEPTH,
    "a level too many, among others": b'{"a":[[],[1],' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"]}",
    "many empty lists": b'{"a":[' + b"[]," * 10**6 + b"[]]}",
    "many empty objects": b'{"a":[' + b"{}," * 10**6 + b"{}]}",
    "many objects in objects": b'{"a":[' + b'{"a":{}},' * 500_000 + b"{}]}",
    "many strings": b'{"a":[' + b'"",' * 10**6 + b'""]}',
    "many numbers": b'{"a":[' + b"1.5," * 10**6 + b"1]}",
    "many fields": json.dumps(dict.fromkeys(map(str, range(MAX_VALUES + 1)))).encode(),
    "a list of more integers than any field takes": b'{"a":{"b":[' + b"1," * MAX_INTEGERS + b"1]}}",
    "many integers that are none": b'{"a":[' + b"1," * MAX_VALUES + b"true]}",
    "many integers that are too large": b'{"a":[' + b"%d," % 2**64 * MAX_VALUES + b"1]}",
    "long and not JSON": b'{"a":[' + b"1," * 10**5 + b"]}",
    "long and not UTF-8": b'{"a":[' + b"1," * 10**5 + b'"\xff"]}',
    "long, with a lone surrogate": b'{"a":[' + b"1," * 10**5 + b'"\\ud800"]}',
}


@pytest.fixture(scope="module")
def bodies() -> Iterator[BodyReader]:
    bodies = BodyReader(8 << 20, MAX_INTEGERS)
    yield bodies
    bodies.close()


def parse_object(bodies: BodyReader, raw: bytes) -> dict[str, Any]:
    return asyncio.run(bodies.parse_object(raw))


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD.keys())
def test_a_bad_body_is_a_400_in_words(bodies: BodyReader, raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(bodies, raw)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_json"
    assert len(str(caught.value)) < 300
    json.dumps(caught.value.body(), ensure_ascii=False).encode()


def test_text_of_every_plane_passes(bodies: BodyReader) -> None:
    text = "a\u00e9\u4e16\U0001f600\x00"
    for raw in (json.dumps({"prompt": text}), json.dumps({"prompt": text}, ensure_ascii=False)):
        assert parse_object(bodies, raw.encode()) == {"prompt": text}


def test_an_escaped_backslash_before_a_surrogates_letters_is_text(bodies: BodyReader) -> None:
    assert parse_object(bodies, rb'{"prompt": "\\ud800"}') == {"prompt": r"\ud800"}


def test_a_long_body_says_what_it_says_wherever_it_is_parsed(bodies: BodyReader) -> None:
    ids = list(range(-5, MAX_INTEGERS - 5))
    body = {
        "prompt": [ids, ids[:MANY_INTEGERS], [], ids[: MANY_INTEGERS + 1], [2**63 - 1] * 1000, [-(2**63)] * 1000],
        "deep": {"a\nb": [{"": [[True] * 1000, [1.0] * 1000, [2**63] * 1000, [None, 1]]}]},
        "text": "\u2028\n\U0001f600\ufffd," * 10_000,
        "stop": ["[", "{", '"', "\\"],
        "many": {str(key): [key] for key in range(1000)},
    }
    raw = json.dumps(body).encode()
    assert raw.count(b",") > MAX_VALUES
    assert parse_object(bodies, raw) == body
    shuffled = json.dumps(body, ensure_ascii=False, indent=1).encode()
    assert parse_object(bodies, shuffled) == body


def test_long_bodies_of_every_kind_come_back_as_they_went(bodies: BodyReader) -> None:
    rng = random.Random(6)

    def value(depth: int) -> Any:
        kind = rng.randrange(8 if depth else 5)
        if kind < 5:
            return rng.choice([None, True, 0, -1.5, "", "a,b[{", "\u4e16", 10**30, []])
        if kind == 5:
            return [rng.randrange(10**6) for _ in range(rng.choice([1, MANY_INTEGERS, 3000]))]
        if kind == 6:
            return [value(depth - 1) for _ in range(rng.randrange(6))]
        return {str(key): value(depth - 1) for key in range(rng.randrange(6))}

    for _ in range(30):
        body = {"a": [value(6) for _ in range(30)], "b": [1] * 40_000, "c": [2] * 40_000}
        assert parse_object(bodies, json.dumps(body).encode()) == body


@pytest.mark.parametrize("count", [1, MAX_VALUES + 1])
def test_integers_of_too_many_digits_are_refused(bodies: BodyReader, count: int) -> None:
    before = sys.get_int_max_str_digits()
    limit_digits()
    try:
        fits = json.dumps({"a": [int("9" * MAX_DIGITS)]}).encode()
        assert parse_object(bodies, fits) == {"a": [int("9" * MAX_DIGITS)]}
        with pytest.raises(ApiError, match=f"an integer has more than {MAX_DIGITS} digits") as caught:
            parse_object(bodies, b'{"a": [' + b"1," * (count - 1) + b"9" * (MAX_DIGITS + 1) + b"]}")
    finally:
        sys.set_int_max_str_digits(before)
    assert caught.value.status == 400


def test_long_bodies_that_wait_to_be_parsed_are_bounded(bodies: BodyReader) -> None:
    raw = b'{"a": "' + b"x" * (bodies.max_bytes - 100) + b'"}'

    async def scenario() -> list[Any]:
        results: list[Any] = await asyncio.gather(
            *map(bodies.parse_object, [raw] * (MAX_LONG_BODIES + 5)), return_exceptions=True
        )
        return results

    for _ in range(2):  # what was parsed waits no more
        read = asyncio.run(scenario())
        refused = [error for error in read if isinstance(error, ApiError)]
        assert len(refused) == 5
        assert {(error.status, error.code) for error in refused} == {(503, "too_many_uploads")}
        assert sum(isinstance(body, dict) for body in read) == MAX_LONG_BODIES
