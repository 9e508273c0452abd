"""The form in which the commands of `command_log` travel: a list in JSON, and a shorter form for most steps.

The messages of most steps are a plan alone, and one token for each item. Their own form takes less time:

```
 "p" | TICK, 8 bytes                           ["plan", TICK]
 "a" | TICK, 8 bytes                           ["ahead", TICK]
 "r" | FIRST, 8 bytes | TOKEN, 4 bytes | ...   ["results", FIRST, [TOKEN, ...]]
```
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from struct import Struct
from typing import Any, Final

from quire.scheduling.decode_columns import DecodeResults
from quire.scheduling.plan import ItemResult

Command = list[Any]

# `json.dumps` with separators makes an encoder for each call, a third of the time of a step's tokens.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
# Tag and number of a short message; its first byte is none of a list in JSON.
_SHORT: Final = Struct("<1sq")
_TAGS: Final = {"plan": b"p", "ahead": b"a", "results": b"r"}
_NAMES: Final = {tag: name for name, tag in _TAGS.items()}
_TOKEN_IDS, _DRAFT = (itemgetter(ItemResult._fields.index(name)) for name in ("token_ids", "draft"))


def encode(commands: list[Command]) -> bytes:
    """Return the message of any commands."""
    return _ENCODER.encode(commands).encode()


def encode_short(name: str, number: int) -> bytes:
    """Return the message of a plan, or the beginning of that of results, whose single tokens follow."""
    return _SHORT.pack(_TAGS[name], number)


def single_tokens(results: Sequence[ItemResult]) -> bytes | None:
    """Return the tokens of results that have one token each and nothing else that travels; None for others."""
    if isinstance(results, DecodeResults):
        return array("i", results.token_ids).tobytes()
    # Without a call of Python for each: all of this is between the tokens of a step and the next step.
    token_ids = list(map(_TOKEN_IDS, results))
    if set(map(len, token_ids)) != {1} or any(map(_DRAFT, results)):
        return None
    return array("i", chain.from_iterable(token_ids)).tobytes()


def decode(message: bytes) -> list[Command]:
    """Return the commands of a message."""
    name = _NAMES.get(message[:1])
    if name is None:
        commands: list[Command] = json.loads(message)
        return commands
    _, number = _SHORT.unpack_from(message)
    if name != "results":
        return [[name, number]]
    return [[name, number, array("i", message[_SHORT.size :]).tolist()]]


def tokens_of(result: ItemResult) -> int | list[Any] | None:
    """Return what travels of a result, as a JSON value; see `command_log`."""
    if result.draft:
        return [list(result.token_ids), list(result.draft)]
    if len(result.token_ids) == 1:
        return result.token_ids[0]
    return None if result.pooled else list(result.token_ids)


def result_of(seq_id: int, tokens: int | list[Any] | None) -> ItemResult:
    """Return the result of a sequence, of a value of `tokens_of`."""
    if tokens is None:
        return ItemResult(seq_id, (), pooled=(0.0,))
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        found, draft = tokens
        return ItemResult(seq_id, tuple(found), draft=tuple(draft))
    return ItemResult(seq_id, (tokens,) if isinstance(tokens, int) else tuple(tokens))
