"""The values that the memory manager answers with."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """Whether memory can be had: now, once others give some back, or not at all."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class AllocStatus(NamedTuple):
    """The answer to a `can_` question, with its reason.

    Args:
        verdict: OK, LATER or NEVER.
        group_idx: the cache group that limits.
        needed: blocks that the request needs of it; for LATER beyond its hit and with what must stay free.
        available: blocks that it could have: now (OK, LATER), or ever (NEVER).
    """

    verdict: Verdict
    group_idx: int
    needed: int
    available: int


class HitEnd(Enum):
    """Why a prefix hit ended where it did."""

    DISABLED = "prefix caching is off"
    NOT_PUBLISHED = "a block that a longer hit needs is not in the prefix index"
    LAST_TOKEN = "at least one token must be computed"
    LIMIT = "the caller asked for no more"


class BlockLoad(NamedTuple):
    """A block of a hit that is on the host.

    Args:
        group_idx: the cache group.
        block_idx: its place in the table.
        host_id: the block of the host tier that holds it.
    """

    group_idx: int
    block_idx: int
    host_id: int


class PrefixHit(NamedTuple):
    """The longest usable published prefix of a token chain.

    Valid until the manager's next command; `allocate` refuses a stale one.

    Args:
        num_tokens: tokens whose KV is reused, a multiple of the block size; less than the chain's tokens.
        block_ids: for each cache group, the blocks that hold them; null where the group needs them no more, and where
            they are only on the host.
        end: why the hit is not longer.
        group_idx: the cache group that lacks a block, when that is why; else None.
        version: the manager's count of changes when the question was asked.
        loads: the blocks that are on the host, group by group; each needs a block of the device to be copied to.
        num_host_tokens: tokens of the hit for which some group has a block on the host only.
    """

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    end: HitEnd
    group_idx: int | None
    version: int
    loads: tuple[BlockLoad, ...] = ()
    num_host_tokens: int = 0
