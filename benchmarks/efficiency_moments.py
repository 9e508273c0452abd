"""The contents of memory at one moment, and the reservations of other allocators for the same sequences.

Everything here is a pure function of a `Moment`, the state of an engine between two steps:

```
 tokens   |<-- prompt -->|<-- output so far -->|<-- output to come -->|
          |<----- num_stored: KV is there ---->|
          |<------------------ num_total ---------------------------->|
 blocks   [    ][    ][    ][    ][    ][    ]
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class HeldSequence(NamedTuple):
    """One running sequence.

    Args:
        num_prompt: tokens of its prompt.
        num_total: tokens of prompt and output when it will have finished.
        num_stored: tokens whose KV is stored.
        block_ids: its block table.
    """

    num_prompt: int
    num_total: int
    num_stored: int
    block_ids: tuple[int, ...]


class Moment(NamedTuple):
    """An engine between two steps.

    Args:
        sequences: those that run.
        block_size: tokens of a block.
        num_used: blocks with holders, as the memory manager counts them.
        is_full: requests waited in the last step, and only memory kept them out.
    """

    sequences: tuple[HeldSequence, ...]
    block_size: int
    num_used: int
    is_full: bool


# Slots that a contiguous reservation has for one sequence, by the model's length.
Reserve = Callable[[HeldSequence, int], int]


def power_of_two(number: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def whole_length(_: HeldSequence, max_model_len: int) -> int:
    """Reserve the model's length, whatever the request."""
    return max_model_len


def power_of_two_output(held: HeldSequence, max_model_len: int) -> int:
    """Reserve the prompt and the next power of two of the output that will come."""
    return min(max_model_len, held.num_prompt + power_of_two(held.num_total - held.num_prompt))


def exact_length(held: HeldSequence, _: int) -> int:
    """Reserve prompt and output, whose length an oracle knows beforehand."""
    return held.num_total


def doubling(held: HeldSequence, max_model_len: int) -> int:
    """Reserve the next power of two of what is stored; who fills a bucket moves to one of twice its size."""
    return min(max_model_len, power_of_two(held.num_stored))


# The first three are those that the paper calls Orca Max, Pow2 and Oracle.
RESERVES: dict[str, Reserve] = {
    "maximum": whole_length,
    "power of two": power_of_two_output,
    "oracle": exact_length,
    "doubling": doubling,
}


def reserved_share(reserve: Reserve, moment: Moment, max_model_len: int) -> float:
    """Return the share of the reserved bytes that hold tokens; nothing is shared, nothing lost between reservations."""
    stored = sum(held.num_stored for held in moment.sequences)
    return stored / sum(reserve(held, max_model_len) for held in moment.sequences)


def filled_slots(moment: Moment) -> dict[int, int]:
    """Return the stored tokens of each block that a table names; a shared block's tokens count once."""
    size = moment.block_size
    filled: dict[int, int] = {}
    for held in moment.sequences:
        for idx, block_id in enumerate(held.block_ids):
            filled[block_id] = max(filled.get(block_id, 0), min(size, held.num_stored - idx * size))
    return filled


def paged_share(moment: Moment) -> float:
    """Return the share of the bytes of blocks with holders that hold tokens.

    Raises:
        RuntimeError: the tables name other blocks than the manager counts, or blocks that hold nothing.
    """
    filled = filled_slots(moment)
    if len(filled) != moment.num_used:
        raise RuntimeError(f"tables name {len(filled)} blocks, the manager counts {moment.num_used}")
    if min(filled.values()) < 1:
        raise RuntimeError("a table names a block that holds no token")
    return sum(filled.values()) / (moment.num_used * moment.block_size)


def bound(num_stored: Sequence[int], block_size: int) -> float:
    """Return the share of full slots when only last blocks are partly empty, by half a block on average.

    A last block holds 1 to `block_size` tokens. Where all are equally likely, `(block_size - 1) / 2` slots are empty.
    """
    stored = sum(num_stored)
    return stored / (stored + len(num_stored) * (block_size - 1) / 2)


def saved_by_sharing(moment: Moment) -> float:
    """Return the share of all tables' entries that needed no block of their own."""
    num_named = sum(len(held.block_ids) for held in moment.sequences)
    return 1 - moment.num_used / num_named
