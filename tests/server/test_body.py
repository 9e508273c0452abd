"""JSON bodies: what is refused, and how."""

from __future__ import annotations

import json

import pytest

from quire.server.body import parse_object
from quire.server.errors import ApiError

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
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD.keys())
def test_21_a_bad_body_is_a_400_in_words(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(raw)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_json"
    json.dumps(caught.value.body(), ensure_ascii=False).encode()


def test_text_of_every_plane_passes() -> None:
    text = "a\u00e9\u4e16\U0001f600\x00"
    for raw in (json.dumps({"prompt": text}), json.dumps({"prompt": text}, ensure_ascii=False)):
        assert parse_object(raw.encode()) == {"prompt": text}


def test_an_escaped_backslash_before_a_surrogates_letters_is_text() -> None:
    assert parse_object(rb'{"prompt": "\\ud800"}') == {"prompt": r"\ud800"}
