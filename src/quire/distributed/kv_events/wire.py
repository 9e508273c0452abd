"""Batches of KV events as msgpack, in vLLM's fields.

```
 [ts, [event, ...], data_parallel_rank]
 event, as a map:    {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}
 event, as an array: ["BlockRemoved", [7], "GPU", 0]            the older form, for consumers that do not read maps
```

Fields that have their default are left out of maps, and out of the ends of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from quire.config.extras import importing_extra
from quire.errors import QuireError, shown
from quire.memory.kv_events import (
    MAX_GROUPS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKeys,
    KVEvent,
    encode,
    token_ids_of,
)

# Fields in the order of arrays.
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
# Number of leading fields that are required; the others are optional.
NUM_REQUIRED: Final = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}
MAX_BLOCK_SIZE = 1 << 20


class InvalidKVEvents(QuireError):
    """A message is not a batch of KV events."""


class EventBatch(NamedTuple):
    """The events of one step.

    Args:
        ts: time of the batch, Unix seconds.
        events: events in order.
        rank: data-parallel rank of the engine, None without one.
    """

    ts: float
    events: list[KVEvent]
    rank: int | None = None


def encode_batch(batch: EventBatch, form: str) -> bytes:
    """Return the message of a batch."""
    write = _as_map if form == "map" else _as_array
    return _msgpack()[0]([batch.ts, [write(event) for event in batch.events], batch.rank])


def decode_batch(data: bytes) -> EventBatch:
    """Return the batch of a message with events of either form.

    Raises:
        InvalidKVEvents: the message is something else.
    """
    try:
        content = _msgpack()[1](data)
    except Exception as error:  # msgspec's own errors, or a text that is not UTF-8
        raise InvalidKVEvents(f"a batch of KV events must be msgpack: {error}") from error
    if not isinstance(content, list) or len(content) < 2 or not isinstance(content[1], list):
        raise InvalidKVEvents(f"a batch of KV events must be [ts, events, rank], got {shown(content)}")
    ts, events, *tail = content
    rank = tail[0] if tail else None
    if isinstance(ts, bool) or not isinstance(ts, int | float) or not (rank is None or _is_count(rank)):
        raise InvalidKVEvents(f"a batch of KV events must begin with a time and end with a rank, got {shown(content)}")
    return EventBatch(float(ts), [_read_event(event) for event in events], rank)


@cache
def _msgpack() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return the functions that encode and decode msgpack."""
    with importing_extra("kv_events_config"):
        import msgspec
    return msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode


def _as_map(event: KVEvent) -> dict[str, Any]:
    """Return the map of an event, in the order of `FIELDS`; written out, since steps have hundreds of fields."""
    if isinstance(event, BlockRemoved):
        hashes, medium, group_idx = event
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group_idx}
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    hashes, parent, tokens, size, medium, group_idx, adapter, extra_keys, kind, window = event
    fields: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids_of(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": adapter,
    }
    if extra_keys is not None:
        fields["extra_keys"] = extra_keys
    fields["group_idx"] = group_idx
    fields["kv_cache_spec_kind"] = kind
    if window is not None:
        fields["kv_cache_spec_sliding_window"] = window
    return fields


def _as_array(event: KVEvent) -> list[Any]:
    fields = _as_map(event)
    kind = fields["type"]
    values = [kind, *map(fields.get, FIELDS[kind])]
    while len(values) > 1 + NUM_REQUIRED[kind] and values[-1] is None:
        values.pop()
    return values


def _read_event(event: Any) -> KVEvent:
    """Return the event of either form; unknown fields are ignored."""
    if isinstance(event, list) and event:
        kind, *values = event
        fields = dict(zip(FIELDS.get(kind, ()), values, strict=False)) if isinstance(kind, str) else {}
    elif isinstance(event, dict):
        kind, fields = event.get("type"), event
    else:
        raise InvalidKVEvents(f"a KV event must be a map with a type, or an array, got {shown(event)}")
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind == "BlockRemoved":
        return BlockRemoved(_hashes(fields), _medium(fields), _group(fields))
    if kind == "BlockStored":
        return _read_stored(fields)
    raise InvalidKVEvents(f"the type of a KV event must be one of {', '.join(FIELDS)}, got {shown(kind)}")


def _read_stored(fields: Mapping[str, Any]) -> BlockStored:
    hashes, token_ids, size = _hashes(fields), fields.get("token_ids"), fields.get("block_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_BLOCK_SIZE:
        raise InvalidKVEvents(f"block_size must be from 1 to {MAX_BLOCK_SIZE}, got {shown(size)}")
    if not isinstance(token_ids, list) or len(token_ids) != size * len(hashes):
        raise InvalidKVEvents(f"token_ids must be {size * len(hashes)} tokens, got {shown(token_ids)}")
    try:
        tokens = encode(token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidKVEvents(f"token_ids must be integers of 32 bits, got {shown(token_ids)}") from error
    parent, window = fields.get("parent_block_hash"), fields.get("kv_cache_spec_sliding_window")
    return BlockStored(
        hashes,
        None if parent is None else _hash(parent),
        tokens,
        size,
        _medium(fields),
        _group(fields),
        _text(fields, "lora_name"),
        _read_extra_keys(fields.get("extra_keys"), len(hashes)),
        _text(fields, "kv_cache_spec_kind") or "full_attention",
        window if _is_count(window) else None,
    )


def _read_extra_keys(keys: Any, count: int) -> ExtraKeys | None:
    """Return the extra keys of blocks; a key of unknown form, from another engine, is kept as text."""
    if keys is None:
        return None
    if not isinstance(keys, list) or len(keys) != count:
        raise InvalidKVEvents(f"extra_keys must be a list with an item for each of {count} blocks, got {shown(keys)}")
    extra_keys: list[tuple[str | tuple[str, str | int], ...] | None] = []
    for block_keys in keys:
        if block_keys is not None and not isinstance(block_keys, list):
            raise InvalidKVEvents(f"the extra keys of a block must be a list or null, got {shown(block_keys)}")
        extra_keys.append(None if block_keys is None else tuple(_read_extra_key(key) for key in block_keys) or None)
    return tuple(extra_keys)


def _read_extra_key(key: Any) -> str | tuple[str, str | int]:
    if isinstance(key, str):
        return key
    if isinstance(key, list) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], str | int):
        return key[0], key[1]
    return repr(key), 0


def _hashes(fields: Mapping[str, Any]) -> tuple[int, ...]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise InvalidKVEvents(f"block_hashes must be a list, got {shown(hashes)}")
    return tuple(map(_hash, hashes))


def _hash(value: Any) -> int:
    """Return a hash as an integer: the last 64 bits if it is given as bytes."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidKVEvents(f"a block hash must be an integer or bytes, got {shown(value)}")
    return value


def _medium(fields: Mapping[str, Any]) -> str:
    return _text(fields, "medium") or "GPU"


def _group(fields: Mapping[str, Any]) -> int:
    group_idx = fields.get("group_idx")
    if group_idx is None:
        return 0
    if not _is_count(group_idx) or group_idx >= MAX_GROUPS:
        raise InvalidKVEvents(f"group_idx must be from 0 to {MAX_GROUPS - 1}, got {shown(group_idx)}")
    return int(group_idx)


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidKVEvents(f"{name} must be a text or null, got {shown(value)}")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
