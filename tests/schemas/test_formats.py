"""Formats of strings: their expressions match right texts, and no wrong ones."""

from __future__ import annotations

import json
from random import Random

import pytest

from quire.sequences.structured import GrammarSource
from quire.text.schemas.formats import FORMATS

walks = pytest.importorskip("tests.schemas.walks")
# By format: texts of it, and texts that are not.
TEXTS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "1999-12-31", "0400-02-29"], ["2023-02-29", "1900-02-29", "2024-04-31", "24-01-01", ""]),
    "time": (["23:59:59Z", "08:30:06.28+02:00"], ["24:00:00Z", "08:30:06", "08:30Z", "08:30:06 Z"]),
    "date-time": (["2024-02-29T08:30:06Z"], ["2024-02-30T08:30:06Z", "2024-02-29 08:30:06Z", "2024-02-29"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT36H", "P4W"], ["P", "PT", "P1D2H", "4DT1H", "P1Y2W"]),
    "email": (["a.b+c@example.org"], ["a@", "@b", "a..b@c.d", ".a@b", "a b@c", "a@-b.c"]),
    "hostname": (["example.org", "a-b.c", "x" * 63], ["-a.b", "a-.b", "a..b", "a_b", "", "x" * 64, "a."]),
    "ipv4": (["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "01.2.3.4", "1.2.3", "1.2.3.4.5"]),
    "ipv6": (
        ["::1", "::", "1:2:3:4:5:6:7:8", "fe80::a:b", "1:2:3:4:5:6:7::"],
        ["1:2", ":::", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9"],
    ),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa98", "2eb8aa08-aa98-11ea-b4aa-73b441d1638g"]),
    "uri": (
        ["https://a.b/c?d=e#f", "urn:isbn:1", "mailto:a@b.c", "http://[::1]:80/"],
        ["//a.b", "a b:c", "/x", "http://a b", "h:%zz"],
    ),
    "uri-reference": (["/a/b?c", "#x", "", "a.b", "//a.b/c", "https://a.b"], ["a b", "\\\\x", "%zz", "a:\\b"]),
    "iri": (["https://a.b/c"], ["/x"]),
    "iri-reference": (["/x"], ["a b"]),
    "json-pointer": (["", "/a/~0~1", "/"], ["a", "/~2", "/a~"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["", "01", "-1", "#", "/a"]),
}  # fmt: skip


def test_each_format_has_examples() -> None:
    assert TEXTS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_right_texts_are_allowed_and_wrong_ones_are_not(name: str) -> None:
    matcher = walks.compiled(GrammarSource("json", json.dumps({"type": "string", "format": name})))
    right, wrong = TEXTS[name]
    assert [text for text in right if not walks.writes(matcher, json.dumps(text))] == []
    assert [text for text in wrong if walks.writes(matcher, json.dumps(text))] == []
    rng, schema = Random(name), {"type": "string", "format": name}
    for _ in range(20):
        text = walks.walk(matcher, rng)
        assert text is None or walks.is_valid(text, schema)
