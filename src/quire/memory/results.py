"""Values that the memory manager returns: verdicts, prefix hits, block copies for the data plane."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum
from operator import add
from typing import NamedTuple


class Verdict(Enum):
    """Availability of memory: now (OK), once other sequences release some (LATER), or never (NEVER)."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class AllocStatus(NamedTuple):
    """The answer to a `can_` query, with its numbers.

    Args:
        verdict: OK, LATER or NEVER.
        group_idx: index of the limiting cache group.
        needed: number of blocks of that group that are needed; for OK and LATER without the hit's blocks, and including
            reserved blocks.
        available: number of blocks of that group that could be taken: now, with the watermark left free (OK, LATER), or
            ever (NEVER). Negative if the needs of other groups, or the watermark, alone exceed the memory.
    """

    verdict: Verdict
    group_idx: int
    needed: int
    available: int


class HitEnd(Enum):
    """The reason for the end of a prefix hit."""

    NOT_CACHED = "no cached prefix continues with the next tokens"
    EVICTED = "the next block was cached and has been evicted"
    GROUP = "a cache group lacks a block or a snapshot that a longer hit needs"
    LIMIT = "prefix caching is off, or the request limits how much is reused"
    LAST_TOKEN = "at least one token must be computed"

    # Members are compared by identity, and `Enum`'s own hash is a Python-level call.
    __hash__ = object.__hash__

    @property
    def label(self) -> str:
        """The reason in one word, for counters."""
        return self.name.lower()


class BlockLoad(NamedTuple):
    """A block of a hit that is on the host only.

    Args:
        group_idx: index of the cache group.
        block_idx: index in the block table.
        host_id: block id on the host tier.
    """

    group_idx: int
    block_idx: int
    host_id: int


class TokenSources(NamedTuple):
    """Token counts by the source of their keys and values; they sum to all tokens.

    Args:
        device: tokens of whole published blocks on the device.
        host: tokens of blocks that were copied from host memory.
        disk: tokens of blocks that were loaded from disk.
        copied: tokens of a partial block hit, or of a published tail that was continued.
        computed: tokens that the model computed.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    copied: int = 0
    computed: int = 0


class TokenAccount(NamedTuple):
    """Token counts by source of their KV, and counts of computed tokens by reason.

    Args:
        sources: counts by source; they sum to all tokens.
        reasons: counts by `HitEnd`, in its order; they sum to `sources.computed`.
    """

    sources: TokenSources = TokenSources()
    reasons: tuple[int, ...] = (0,) * len(HitEnd)

    def plus(self, other: TokenAccount) -> TokenAccount:
        """Return the sum of both accounts."""
        sources = TokenSources._make(map(add, self.sources, other.sources))
        return TokenAccount(sources, tuple(map(add, self.reasons, other.reasons)))

    def minus(self, earlier: TokenAccount) -> TokenAccount:
        """Return the difference to an earlier account."""
        if earlier is self:
            return NO_TOKENS
        sources = TokenSources(*(new - old for new, old in zip(self.sources, earlier.sources, strict=True)))
        return TokenAccount(sources, tuple(new - old for new, old in zip(self.reasons, earlier.reasons, strict=True)))

    def by_reason(self) -> dict[str, int]:
        """Return the computed tokens by the label of their reason."""
        return {end.label: count for end, count in zip(HitEnd, self.reasons, strict=True)}


NO_TOKENS = TokenAccount()


class PrefixHit(NamedTuple):
    """The longest usable published prefix of a token chain.

    Valid until the manager's next command; `allocate` refuses a stale hit.

    Args:
        num_tokens: number of tokens whose keys and values are reused; less than the chain's tokens.
        block_ids: block ids for each cache group; null for blocks that the group no longer reads, or that are on the
            host only.
        end: reason for the end of the hit.
        group_idx: index of the cache group that lacks a block or a snapshot, if `end` is `GROUP`; else None.
        version: the manager's `version` at the time of the query.
        num_copied: number of tokens in a last block that is used in part; the next write copies it.
        differs_at: position of the first token that differs from the published block that continues the hit, if `end`
            is `NOT_CACHED` and there is such a block; else None.
        loads: blocks that are on the host, group by group; each is copied to a block of the device.
        num_host_tokens: number of tokens of the hit for which some group has a block on the host only.
        diverged_at: number of tokens of whole blocks after which the prompt diverges from a branch of the prefix tree;
            0 if it does not, or if all groups retain all tokens. The next prompt may diverge there too: so a snapshot
            of states is taken there, and blocks that are read there are not evicted first.
    """

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    end: HitEnd
    group_idx: int | None
    version: int
    num_copied: int = 0
    differs_at: int | None = None
    loads: tuple[BlockLoad, ...] = ()
    num_host_tokens: int = 0
    diverged_at: int = 0

    def account(self, num_tokens: int, num_disk_tokens: int = 0) -> TokenAccount:
        """Return the account of a sequence that opens on this hit.

        The last token is always computed; the other computed tokens count for the reason of the hit's end.

        Args:
            num_tokens: number of tokens of the sequence.
            num_disk_tokens: number of host tokens of the hit that were loaded from disk for this sequence.
        """
        num_computed = num_tokens - self.num_tokens
        reasons = dict.fromkeys(HitEnd, 0)
        reasons[HitEnd.LAST_TOKEN] += 1
        reasons[self.end] += num_computed - 1
        num_device = self.num_tokens - self.num_copied - self.num_host_tokens
        num_host = self.num_host_tokens - num_disk_tokens
        sources = TokenSources(num_device, num_host, num_disk_tokens, self.num_copied, num_computed)
        return TokenAccount(sources, tuple(reasons.values()))


class Tier(IntEnum):
    """The tiers of memory."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class StoredBlock(NamedTuple):
    """The identity of a published block, in a form that outlives the process.

    Args:
        group_idx: index of the cache group.
        digest: identity of the block.
        tokens: content of the block: its token ids, then its media entries.
        parent: identity of the block before it, or of the namespace.
    """

    group_idx: int
    digest: bytes
    tokens: bytes
    parent: bytes


class BlockCopy(NamedTuple):
    """Copy a whole block of one cache group (all layers, K and V, or their states).

    Args:
        group_idx: index of the group.
        src_id, dst_id: block ids in `src_tier` and `dst_tier`. From disk: the ticket under which the block was read. To
            disk: the index of its identity in `MemoryOps.saves`.
        src_tier, dst_tier: tiers of the blocks.
    """

    group_idx: int
    src_id: int
    dst_id: int
    src_tier: Tier = Tier.DEVICE
    dst_tier: Tier = Tier.DEVICE


class FetchedBlock(NamedTuple):
    """A block of a chain that was read from disk and verified.

    Args:
        group_idx: index of the cache group.
        block_idx: index in the chain.
        ticket: number under which the data plane has its bytes.
    """

    group_idx: int
    block_idx: int
    ticket: int


class MemoryOps(NamedTuple):
    """Copies of blocks, in order: a later copy may read the target of an earlier one.

    Args:
        copies: the copies.
        saves: identities of the blocks that are copied to disk.
    """

    copies: tuple[BlockCopy, ...] = ()
    saves: tuple[StoredBlock, ...] = ()


class TableDelta(NamedTuple):
    """A change of a sequence's block table in one cache group: `table[start:] = block_ids`.

    Appends, copy-on-write, merges of duplicates and truncation (without ids) all have this form.
    """

    group_idx: int
    start: int
    block_ids: tuple[int, ...]


NO_OPS = MemoryOps()


def joined(parts: Iterable[MemoryOps]) -> MemoryOps:
    """Return the copies of several plans as one, in their order."""
    copies: list[BlockCopy] = []
    saves: list[StoredBlock] = []
    for part in parts:
        # A copy to disk names its block by its index in `saves`.
        first = len(saves)
        copies += (
            copy._replace(dst_id=first + copy.dst_id) if copy.dst_tier is Tier.DISK else copy for copy in part.copies
        )
        saves += part.saves
    return MemoryOps(tuple(copies), tuple(saves))
