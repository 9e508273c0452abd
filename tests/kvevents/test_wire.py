"""Messages have the shapes of vLLM's, and whatever else arrives is refused.

What vLLM 0.33 sends for the events of one step, decoded:

    [1.5, [{"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2],
            "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
            "kv_cache_spec_kind": "full_attention"},
           {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
           {"type": "AllBlocksCleared"}], 0]

Optional fields with their default are left out. Hashes are integers of 64 bits, or bytes.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from quire.distributed.kv_events.wire import EventBatch, InvalidKVEvents, decode_batch, encode_batch
from quire.memory.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, encode

STORED = BlockStored((7,), None, encode([1, 2]), 2, "GPU")
EVENTS: list[KVEvent] = [STORED, BlockRemoved((7,), "GPU"), AllBlocksCleared()]
FULL = BlockStored(
    *((2**64 - 1, 5), 3, encode([1, 2, 3, 2**32 - 1]), 2, "STORAGE", 1, "sql"),
    ((("ab", -3), "salt", ("tenant", "blue")), None),
    *("sliding_window", 128),
)


def test_maps_are_those_of_vllm() -> None:
    assert msgspec.msgpack.decode(encode_batch(EventBatch(1.5, EVENTS, 0), "map")) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_arrays_have_the_fields_in_the_same_order() -> None:
    assert msgspec.msgpack.decode(encode_batch(EventBatch(1.5, EVENTS), "array")) == [
        1.5,
        [
            ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, None, 0, "full_attention"],
            ["BlockRemoved", [7], "GPU", 0],
            ["AllBlocksCleared"],
        ],
        None,
    ]


@pytest.mark.parametrize("form", ["map", "array"])
def test_every_field_arrives(form: str) -> None:
    batch = EventBatch(2.0, [FULL, *EVENTS], 3)
    assert decode_batch(encode_batch(batch, form)) == batch


def test_hashes_of_bytes_count_by_their_last_64_bits() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [bytes(24) + b"\0" * 7 + b"\x09"], "medium": None}
    assert decode_batch(msgspec.msgpack.encode([0, [event]])).events == [BlockRemoved((9,), "GPU")]


def stored(**fields: Any) -> list[Any]:
    event = msgspec.msgpack.decode(encode_batch(EventBatch(0.0, [STORED]), "map"))[1][0]
    return [0.0, [event | fields], None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "must be \\[ts, events, rank\\]"),
        ([1.0], "must be \\[ts, events, rank\\]"),
        (["now", [], None], "must begin with a time"),
        ([1.0, [], -1], "end with a rank"),
        ([1.0, [7], None], "a map with a type, or an array"),
        ([1.0, [{"type": "BlockMoved"}], None], "one of BlockStored, BlockRemoved, AllBlocksCleared, got 'BlockMoved'"),
        ([1.0, [[["BlockStored"]]], None], "the type of a KV event"),
        ([1.0, [{"type": "BlockRemoved", "block_hashes": 7}], None], "block_hashes must be a list, got 7"),
        (stored(block_hashes=[True]), "an integer or bytes, got True"),
        (stored(block_size=0), "block_size must be from 1"),
        (stored(token_ids=[1, 2, 3]), "token_ids must be 2 tokens"),
        (stored(token_ids=[1, -2]), "integers of 32 bits"),
        (stored(token_ids=[1, "a"]), "integers of 32 bits"),
        (stored(medium=3), "medium must be a text"),
        (stored(group_idx=64), "group_idx must be from 0 to 63, got 64"),
        (stored(extra_keys=[]), "an item for each of 1 blocks"),
        (stored(extra_keys=["salt"]), "a list or null"),
    ],
)
def test_what_is_no_batch_is_refused(content: Any, message: str) -> None:
    with pytest.raises(InvalidKVEvents, match=message):
        decode_batch(msgspec.msgpack.encode(content))


def test_damaged_messages_are_refused_or_read_and_nothing_else() -> None:
    rng, num_refused = random.Random(1), 0
    message = encode_batch(EventBatch(2.0, [FULL, *EVENTS], 3), "map")
    for _ in range(3000):
        data = bytearray(message)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode_batch(bytes(data[: rng.randrange(len(data) + 1)]))
        except InvalidKVEvents:
            num_refused += 1
    assert num_refused > 2000
