"""Values that no client should send: of the wrong type, at the ends of ranges, too deep, too many, not quite text."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, 63, 64, 65, 127, 128, 129, 255, 256, 1024, 4095, 4096, 65535, 65536),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**300),
    *(0.0, -0.0, 0.5, 1.0, -1.0, 1.5, 1e-5, 1e-38, 1e-45, 7e-46, 1e-300, 5e-324, 1e16, 1e38, 1e39, 1e308, -1e308),
    *(0.1 + 0.2, 1 - 1e-16, 1 + 1e-16, 1e999, -1e999),
)
CHARACTERS = (
    *("a", "Z", " ", "\n", "\t", "\0", "\x1b[31m", "\x7f", "\x85", "\u2028", "\ufeff", "\ufffd", "\uffff"),
    *("\u00e9", "e\u0301", "\u202e", "\u0f40", "\u4e2d", "\U0001f984", "\U0001f468\u200d\U0001f469", "\U0010ffff"),
    *(
        "\ue000",
        "\U000f0000",
        "\U00100000",
        "<|",
        "|>",
        "<|bos|>",
        "<|eos|>",
        "<|user|>",
        "<tool_call>",
        "</tool_call>",
        "{{ 7 * 7 }}",
        "{% raw %}",
        "%s",
        "${x}",
    ),
    *('"', "\\", "\\u0000", "'; DROP", "../", "http://localhost/", "[DONE]", "data: "),
)
SURROGATES = (r'"\ud800"', r'"a\udfff"', r'"\udc00\ud800"', r'"\ud83e\udd84"', r'"\uD800\u0041"', r'{"\ud800": 1}')
BROKEN = (
    *(b"", b" ", b"{", b"}", b"[", b'"', b"nul", b"null", b"true", b"0", b"-", b"1e", b"[]", b'"a"', b"{}{}", b"{},"),
    *(b'{"prompt"}', b'{"prompt":}', b'{"prompt":"a",}', b"{'prompt':'a'}", b'{"prompt":"a"}x', b'{"prompt":"a"'),
    *(b"NaN", b'{"n":NaN}', b'{"n":Infinity}', b'{"n":-Infinity}', b'{"n":+1}', b'{"n":01}', b'{"n":.5}', b'{"n":1.}'),
    *(b'{"prompt":"\n"}', b'{"prompt":"\\x41"}', b'{"prompt":"\\u12"}', b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00"),
    *(b'{"prompt":"\xff"}', b'{"prompt":"\xc0\x80"}', b'{"prompt":"\xed\xa0\x80"}', b"\0", b"//\n{}", b"/**/{}"),
    *(b'{"prompt":"a","prompt":["b"]}', b'{"":1,"":2}', b'{"n":1' + b"0" * 5000 + b"}", b'{"n":1e' + b"9" * 400 + b"}"),
    *(b"prompt=a", b"--x\r\n\r\n", b"<x/>", b"\x80\x04.", b"\x1f\x8b\x08\x00"),
)


def number(rng: Random) -> Any:
    """Return a number, often one at the end of some range."""
    if rng.random() < 0.7:
        return rng.choice(NUMBERS)
    return rng.choice([rng.randint(-10, 200), rng.uniform(-2, 3), rng.randint(-(2**70), 2**70), rng.gauss(0, 1e6)])


def text(rng: Random, most: int = 60) -> str:
    """Return a text of odd characters."""
    length = rng.choice([0, 1, 1, 2, 5, 20, most])
    return "".join(rng.choices(CHARACTERS, k=min(length, most)))


def scalar(rng: Random) -> Any:
    """Return a value without parts."""
    return rng.choice([None, True, False, number(rng), number(rng), text(rng), "", "a"])


def value(rng: Random, depth: int = 3) -> Any:
    """Return any value."""
    kind = rng.random()
    if depth == 0 or kind < 0.5:
        return scalar(rng)
    if kind < 0.75:
        return [value(rng, depth - 1) for _ in range(rng.choice([0, 1, 2, 4]))]
    return {name(rng): value(rng, depth - 1) for _ in range(rng.choice([0, 1, 2, 4]))}


def name(rng: Random) -> str:
    """Return a name of a field or a function."""
    return rng.choice(["a", "type", "name", "", "self", "__class__", "x" * 65, "n\0", text(rng, 5), str(rng.random())])


def deep(rng: Random, depth: int) -> Any:
    """Return a nested value; built in a loop, since there are more of them than frames."""
    inner: Any = rng.choice([1, "a", None, [], {}])
    shape = rng.choice(["list", "object", "both"])
    for level in range(depth):
        inner = [inner] if shape == "list" or (shape == "both" and level % 2) else {"a": inner}
    return inner


def dumps(body: Any) -> bytes:
    """Return a body as JSON, however deep it is; what JSON cannot say (infinity) is written as a large number."""
    try:
        return json.dumps(body).replace("Infinity", "1e999").encode()
    except RecursionError:
        return _dumps_deep(body)


def _dumps_deep(body: Any) -> bytes:
    """Write lists and objects by a stack of our own."""
    out: list[str] = []
    todo: list[Any] = [body]
    while todo:
        item = todo.pop()
        if isinstance(item, _Raw):
            out.append(item)
        elif isinstance(item, list):
            todo.append(_Raw("]"))
            for place, each in enumerate(reversed(item), 1):
                todo += [each, _Raw("," if place < len(item) else "")]
            out.append("[")
        elif isinstance(item, dict):
            todo.append(_Raw("}"))
            for place, (key, each) in enumerate(reversed(item.items()), 1):
                todo += [each, _Raw(f"{',' if place < len(item) else ''}{json.dumps(key)}:")]
            out.append("{")
        else:
            out.append(json.dumps(item).replace("Infinity", "1e999"))
    return "".join(out).encode()


class _Raw(str):
    """JSON that is written already."""


def many(rng: Random, most: int) -> Any:
    """Return an array or an object of many parts."""
    count = rng.choice([100, 1000, most])
    make: Callable[[], Any] = rng.choice(
        [
            lambda: [5] * count,
            lambda: list(range(count)),
            lambda: ["a"] * count,
            lambda: [str(idx) for idx in range(count)],
            lambda: [[]] * count,
            lambda: [[5]] * count,
            lambda: {str(idx): 1 for idx in range(count)},
            lambda: [{"role": "user", "content": "a"}] * count,
            lambda: [0.5] * count,
            lambda: [10 ** rng.choice([600, 4000])] * (count // 4000 + 1),
        ]
    )
    return make()


def long_text(rng: Random, most: int) -> str:
    """Return a long text of one of the kinds that tokenizers like least."""
    length = rng.choice([most // 64, most // 8, most // 2, most - 200])
    piece = rng.choice(["a", " ", "ab ", "hello a b c ", "\n", "\u4e2d", "\U0001f984", "<|user|>", "1", "a\u0301", "'"])
    return (piece * (length // len(piece.encode()) + 1))[: length // max(1, len(piece.encode()) // len(piece))]
