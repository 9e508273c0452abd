"""The wire format of the commands of `command_log`: a JSON list, and a shorter binary format for most steps.

Most steps have a plan without other commands, and one token for each item. Their binary format takes less time:

```
 "p" | TICK, 8 bytes                           ["plan", TICK]
 "a" | TICK, 8 bytes                           ["ahead", TICK]
 "r" | SEQ, 8 bytes | TOKEN, 4 bytes | ...     ["results", SEQ, [TOKEN, ...]]
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

# `json.dumps` with separators makes an encoder for each call: a third of the time to encode a step's tokens.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
# Tag and number of a short message; no JSON list begins with one of the tags.
_SHORT: Final = Struct("<1sq")
_TAGS: Final = {"plan": b"p", "ahead": b"a", "results": b"r"}
_NAMES: Final = {tag: name for name, tag in _TAGS.items()}
_TOKEN_IDS, _DRAFT = (itemgetter(ItemResult._fields.index(name)) for name in ("token_ids", "draft"))


def encode(commands: list[Command]) -> bytes:
    """Return the JSON message of any commands."""
    return _ENCODER.encode(commands).encode()


def encode_short(name: str, number: int) -> bytes:
    """Return the short message of a plan, or the head of a results message, which the tokens follow."""
    return _SHORT.pack(_TAGS[name], number)


def single_tokens(results: Sequence[ItemResult]) -> bytes | None:
    """Return the encoded tokens of results that have only one token each to send; None for other results."""
    if isinstance(results, DecodeResults):
        return array("i", results.token_ids).tobytes()
    # No Python-level call for each result: this code delays the next step.
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
    """Return the part of a result that is sent, as a JSON value; see `command_log`."""
    if result.draft:
        return [list(result.token_ids), list(result.draft)]
    if len(result.token_ids) == 1:
        return result.token_ids[0]
    return None if result.pooled else list(result.token_ids)


def result_of(seq_id: int, tokens: int | list[Any] | None) -> ItemResult:
    """Return the result of a sequence from a value of `tokens_of`."""
    if tokens is None:
        return ItemResult(seq_id, (), pooled=(0.0,))
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        found, draft = tokens
        return ItemResult(seq_id, tuple(found), draft=tuple(draft))
    return ItemResult(seq_id, (tokens,) if isinstance(tokens, int) else tuple(tokens))
