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
    NO_SNAPSHOT = "a group of states has no snapshot where a longer hit would end"


class PrefixHit(NamedTuple):
    """The longest usable published prefix of a token chain.

    Valid until the manager's next command; `allocate` refuses a stale one.

    Args:
        num_tokens: tokens whose KV is reused, a multiple of the block size; less than the chain's tokens.
        block_ids: for each cache group, the blocks that hold them; null where the group needs them no more.
        end: why the hit is not longer.
        group_idx: the cache group that lacks a block, when that is why; else None.
        version: the manager's count of changes when the question was asked.
        parted_at: tokens of the longer hit that all groups but those of states could serve: where prompts were seen
            to part, so that a snapshot there is worth its block; 0 when there is none.
    """

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    end: HitEnd
    group_idx: int | None
    version: int
    parted_at: int = 0
