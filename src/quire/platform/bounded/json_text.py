"""Parsing of clients' JSON within limits of time, memory, depth and number of values.

Parsing holds the interpreter lock: 8 MB of small objects take 0.9 s and 300 MB, and give 900,000 useless values. A text
that may have more than `MAX_VALUES` values is therefore parsed in a separate process, which returns only values within
the limits: few values, and long lists of integers (such as prompts), which are sent as arrays.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from quire.platform.bounded.process import BoundedProcess, LimitExceeded, ProcessPool

MAX_DEPTH = 128
MAX_VALUES = 1 << 16
# Texts up to this size are parsed in this process.
FEW_BYTES = 1 << 16
# Lists of more integers are sent as arrays, and converted back in parts of `PART` integers.
MANY_INTEGERS = 256
PART = 1 << 16
TIMEOUT_S = 10.0
# Maximum memory of parsing, in bytes per byte of the text: up to `GROWING_BYTES`, where all of it may be values, and of
# the rest of a longer text, most of which is in long strings.
GROWTH = 64
STRING_GROWTH = 16
GROWING_BYTES = 8 << 20
MAX_PROCESSES = 2
# No field needs an integer of more digits, and parsing takes quadratic time. It is the lowest limit that Python allows.
MAX_DIGITS = 640
# An escaped UTF-16 surrogate; a text without one cannot contain a lone surrogate.
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Path = list[str | int]


class BadJSON(ValueError):
    """A text that is not JSON or exceeds a limit; the message has the reason, as "... at line 1, column 2"."""


def parse(raw: bytes, *, is_strict: bool = True) -> Any:
    """Parse JSON by RFC 8259: no NaN, no infinity, no lone surrogates; nested at most `MAX_DEPTH` levels deep.

    Args:
        raw: text in UTF-8.
        is_strict: False to accept NaN and infinities, which many files have.

    Raises:
        BadJSON: the text is not JSON, or exceeds a limit.
    """
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant if is_strict else None)
        if SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise BadJSON(f"byte {error.start} is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise BadJSON("a string holds half of a surrogate pair") from error
    except RecursionError as error:
        raise BadJSON("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise BadJSON(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        is_long = "integer string conversion" in str(error)
        raise BadJSON(f"an integer has more than {MAX_DIGITS} digits" if is_long else str(error)) from error
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        check_depth(value)
    return value


def limit_digits() -> None:
    """Set this process's limit of the digits of an integer to `MAX_DIGITS`."""
    sys.set_int_max_str_digits(MAX_DIGITS)


def check_depth(value: Any) -> None:
    """Refuse a value that is nested more than `MAX_DEPTH` levels deep, since later code may recurse over it."""
    level = [[value]]
    for _ in range(MAX_DEPTH + 1):
        level = [item for parent in level for item in _items(parent) if type(item) in (dict, list)]
        if not level:
            return
    raise BadJSON(f"it is nested more than {MAX_DEPTH} levels deep")


def may_have_many_values(raw: bytes) -> bool:
    """Return whether a text may have more than `MAX_VALUES`: every value except the first follows `,`, `[` or `{`."""
    return len(raw) > FEW_BYTES and sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES


class JSONReader:
    """Parses texts that may have many values, in separate processes that start when needed; thread-safe.

    Args:
        max_bytes: maximum size of a text, which sets the memory limit of a process.
        max_integers: maximum length of a list of integers; longer ones are refused inside the process.
    """

    def __init__(self, max_bytes: int, max_integers: int) -> None:
        grown = min(max_bytes, GROWING_BYTES)
        memory_bytes = GROWTH * grown + STRING_GROWTH * (max_bytes - grown) + (256 << 20)
        setup = json.dumps(max_integers).encode()
        program = "quire.platform.bounded.json_text:open_reader"
        self._processes = ProcessPool(lambda: BoundedProcess(program, setup, memory_bytes), MAX_PROCESSES)

    def parse(self, raw: bytes) -> Any:
        """Parse JSON; see the function `parse`.

        Raises:
            BadJSON: the text is not JSON, has too many values or too long a list, or exceeds another limit.
            WorkerError: the process does not start.
        """
        try:
            with self._processes.process() as process:
                answer = process.ask(raw, TIMEOUT_S)
        except LimitExceeded as error:
            raise BadJSON("it has too many values") from error
        header, _, payload = answer.partition(b"\n")
        reason, lists = json.loads(header)
        if reason:
            raise BadJSON(reason)
        num_integers = sum(count for _, count in lists)
        integers = array("q")
        split = len(payload) - num_integers * integers.itemsize
        integers.frombytes(payload[split:])
        value, start = json.loads(payload[:split]), 0
        for path, count in lists:
            whole: list[int] = []
            for part in range(start, start + count, PART):
                whole += integers[part : min(part + PART, start + count)].tolist()
            value, start = _put(value, path, whole), start + count
        return value

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def open_reader(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that parses a text; called in the separate process."""
    max_integers = json.loads(setup)
    limit_digits()

    def answer(raw: bytes) -> bytes:
        try:
            value = parse(raw)
            whole = [value]
            lists = list(_take_integers(whole, max_integers))
        except BadJSON as error:
            return json.dumps([str(error), []]).encode() + b"\n"
        header = json.dumps(["", [[path, len(integers)] for path, integers in lists]]).encode()
        text = json.dumps(whole[0], ensure_ascii=False).encode()
        return b"".join([header, b"\n", text, *(integers.tobytes() for _, integers in lists)])

    return answer


def _take_integers(whole: list[Any], max_integers: int) -> Iterator[tuple[Path, array[int]]]:
    """Remove long lists of integers from a value, yield them with their paths, and count all other values."""
    num_values = 0
    left: list[tuple[Any, Path]] = [(whole, [])]
    while left:
        parent, path = left.pop()
        num_values += len(parent)
        if num_values > MAX_VALUES:
            raise BadJSON(f"it has more than {MAX_VALUES} values, long lists of integers not counted")
        for key, item in list(parent.items() if type(parent) is dict else enumerate(parent)):
            item_path = [*path, key]
            if type(item) is list and len(item) > MANY_INTEGERS and {*map(type, item)} == {int}:
                integers = _as_array(item)
                if len(item) > max_integers:
                    name = ".".join(map(str, item_path[1:]))[:100]
                    raise BadJSON(f"{name} has {len(item)} integers, and no list may have more than {max_integers}")
                if integers is not None:
                    parent[key] = None
                    yield item_path[1:], integers
                    continue
            if type(item) in (dict, list):
                left.append((item, item_path))


def _as_array(integers: list[int]) -> array[int] | None:
    try:
        return array("q", integers)
    except OverflowError:
        return None


def _put(value: Any, path: Path, item: Any) -> Any:
    """Set the item at a path in a value, and return the value."""
    if not path:
        return item
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = item
    return value


def _items(value: Any) -> Any:
    return value.values() if type(value) is dict else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
