"""Values that memory returns: verdicts of questions, hits and why they end, operations for the data plane."""

from __future__ import annotations

from enum import Enum, IntEnum
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
        needed: blocks of that group that the request needs; for LATER beyond its hit, with those reserved for others.
        available: blocks that it could have: now, with the watermark left free (OK, LATER), or ever (NEVER).
    """

    verdict: Verdict
    group_idx: int
    needed: int
    available: int


class HitEnd(Enum):
    """Why a prefix hit ended where it did."""

    NOT_CACHED = "no cached prefix continues with the next tokens"
    EVICTED = "the next block was cached and has been evicted"
    GROUP = "a cache group lacks a block or a snapshot that a longer hit needs"
    LIMIT = "prefix caching is off, or the request limits how much is reused"
    LAST_TOKEN = "at least one token must be computed"

    @property
    def label(self) -> str:
        """The reason in one word, for counters."""
        return self.name.lower()


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


class TokenSources(NamedTuple):
    """Where the KV of tokens came from; all together are all tokens.

    Args:
        device: whole published blocks on the device.
        host: blocks that came back from host memory.
        disk: blocks that came back from disk.
        copied: the first part of a published block, which was copied, or a published tail that was continued.
        computed: went through the model.
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
        """Return both together."""
        sources = TokenSources(*(mine + theirs for mine, theirs in zip(self.sources, other.sources, strict=True)))
        return TokenAccount(sources, tuple(map(sum, zip(self.reasons, other.reasons, strict=True))))

    def minus(self, earlier: TokenAccount) -> TokenAccount:
        """Return what came since an earlier count."""
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

    Valid until the manager's next command; `allocate` refuses a stale one.

    Args:
        num_tokens: tokens whose KV is reused; less than the chain's tokens.
        block_ids: for each cache group, the blocks that hold them; null where the group needs them no more, and where
            they are only on the host.
        end: why the hit is not longer.
        group_idx: the cache group that lacks a block or a snapshot, where `end` is `GROUP`; else None.
        version: the manager's count of changes when the question was asked.
        num_copied: of the tokens, those in a last block of which only they are used; who writes behind them gets
            a copy of it.
        differs_at: position of the first token that differs from the published block that continues the hit, where
            `end` is `NOT_CACHED` and there is such a block; else None.
        loads: the blocks that are on the host, group by group; each needs a block of the device to be copied to.
        num_host_tokens: tokens of the hit for which some group has a block on the host only.
        parted_at: tokens of whole blocks after which the prompt parts from what the prefix tree has, which goes on
            otherwise there; 0 where it does not, and where all groups keep all tokens. The next prompt may part there
            too: a snapshot of states is worth its block, and blocks that are read there are kept like others.
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
    parted_at: int = 0

    def account(self, num_tokens: int, num_disk_tokens: int = 0) -> TokenAccount:
        """Return the account of a sequence of so many tokens that opens on this hit.

        The last token is computed whatever is published; the others that are computed, because the hit ended.

        Args:
            num_tokens: of the sequence.
            num_disk_tokens: of those that the host has, the ones that were loaded from disk for this sequence.
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
    """Where blocks lie."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class StoredBlock(NamedTuple):
    """What a published block is, in a form that outlives the process.

    Args:
        group_idx: the cache group.
        digest: its identity.
        tokens: the content of the block: its token ids, and its media entry behind them.
        parent: the identity of the block before it, or of the namespace.
    """

    group_idx: int
    digest: bytes
    tokens: bytes
    parent: bytes


class BlockCopy(NamedTuple):
    """Copy a whole block of one cache group (all layers, K and V, or their states).

    Args:
        group_idx: the group.
        src_id, dst_id: block ids, each of its own tier. From disk: the ticket under which the block was read. To disk:
            the place of what it is in `MemoryOps.saves`.
        src_tier, dst_tier: where the blocks lie.
    """

    group_idx: int
    src_id: int
    dst_id: int
    src_tier: Tier = Tier.DEVICE
    dst_tier: Tier = Tier.DEVICE


class FetchedBlock(NamedTuple):
    """A block of a chain that was read from disk and found whole.

    Args:
        group_idx: the cache group.
        block_idx: its place in the chain.
        ticket: the number under which the data plane has its bytes.
    """

    group_idx: int
    block_idx: int
    ticket: int


class MemoryOps(NamedTuple):
    """Ordered byte movements; a later one may read what an earlier one wrote, so they are never reordered.

    Args:
        copies: the movements.
        saves: what those are that go to disk.
    """

    copies: tuple[BlockCopy, ...] = ()
    saves: tuple[StoredBlock, ...] = ()


class TableDelta(NamedTuple):
    """How one cache group's block table of one sequence changed: `table[start:] = block_ids`.

    Appends, copy-on-write, merges of duplicates and truncation (then without ids) are all of this form.
    """

    group_idx: int
    start: int
    block_ids: tuple[int, ...]


NO_OPS = MemoryOps()
