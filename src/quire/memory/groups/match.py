"""The longest prefix hit: whole blocks in all groups, part of one more, and the reason of its end."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.groups.cache_group import CacheGroup, PrefixRun, find_prefix
from quire.memory.groups.partial_block import longest_partial_match
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.prefix.token_chain import TOKEN_BYTES, TokenChain
from quire.memory.results import HitEnd, PrefixHit


def find_hit(
    groups: Sequence[CacheGroup],
    chain: TokenChain,
    max_tokens: int | None,
    version: int,
    host_groups: Sequence[CacheGroup] = (),
    *,
    keeps_all: bool = False,
) -> PrefixHit:
    """Find the longest hit of whole blocks, and extend it into the published block with the most of the next tokens.

    A longer hit never needs more of the earlier blocks than a shorter one, so every hit of whole blocks may be
    extended.
    """
    size, num_tokens = groups[0].spec.block_size, len(chain.tokens)
    most = max(0, num_tokens - 1)
    limit = most if max_tokens is None else max(0, min(most, max_tokens))
    run = find_prefix(groups, chain, limit // size, host_groups)
    start = run.num_blocks * size
    # States exist for whole blocks only; with recurrent groups, the token groups still give the first different token.
    token_groups = [group for group in groups if not group.spec.is_recurrent]
    next_one = None
    if token_groups and start < limit:
        content = chain.part(start, min(start + size, num_tokens))
        next_one = longest_partial_match(token_groups, chain, run.num_blocks, content)
    is_divisible = len(token_groups) == len(groups)
    num_copied, block_ids, loads = 0, run.block_ids, run.loads
    if next_one is not None and is_divisible:
        num_copied = min(next_one.num_tokens, limit - start)
    end = start + num_copied
    if num_copied and next_one is not None:
        block_ids = tuple(
            _without_dead((*shared, last), group.num_skipped(end))
            for group, shared, last in zip(groups, run.block_ids, next_one.block_ids, strict=True)
        )
    if loads:
        # Blocks that the longer hit does not read are not loaded from the host.
        loads = tuple(load for load in loads if load.block_idx >= groups[load.group_idx].num_skipped(end))
    if end == limit or (not is_divisible and run.num_blocks == limit // size):
        reason = HitEnd.LAST_TOKEN if limit == most else HitEnd.LIMIT
    else:
        reason = _reason(groups, chain, run)
    group_idx = run.group_idx if reason is HitEnd.GROUP else None
    differs_at = None
    if reason is HitEnd.NOT_CACHED and next_one is not None:
        is_parting = next_one.num_tokens * TOKEN_BYTES < len(next_one.content)
        differs_at = start + next_one.num_tokens if is_parting else None
    num_host_tokens = len({load.block_idx for load in loads}) * size if loads else 0
    diverged_at = 0 if keeps_all else _diverged_at(groups, chain, limit // size)
    return PrefixHit(
        end, block_ids, reason, group_idx, version, num_copied, differs_at, loads, num_host_tokens, diverged_at
    )


def _diverged_at(groups: Sequence[CacheGroup], chain: TokenChain, most_blocks: int) -> int:
    """Return the number of tokens of the chain's blocks in the tree, if the tree continues differently; else 0."""
    cursor = groups[0].pool.index.tree.match(chain, most_blocks)
    num_known = cursor.num_known
    if not 0 < num_known < most_blocks:
        return 0
    node, position = cursor.position_after(num_known)
    content = chain.content(num_known)
    # A tail that is a prefix of the prompt's next block is no divergence.
    others = (branch for branch in node.branches.get(position, {}).values() if not content.startswith(branch.data))
    is_parting = position < node.length or next(others, None) is not None
    return num_known * groups[0].spec.block_size if is_parting else 0


def _without_dead(block_ids: tuple[int, ...], num_skipped: int) -> tuple[int, ...]:
    return (NULL_BLOCK,) * num_skipped + block_ids[num_skipped:]


def _reason(groups: Sequence[CacheGroup], chain: TokenChain, run: PrefixRun) -> HitEnd:
    """Return why a hit is shorter than its limit."""
    if run.group_idx is not None and groups[run.group_idx].spec.is_recurrent:
        return HitEnd.GROUP
    block_idx, size = run.num_blocks, groups[0].spec.block_size
    if (block_idx + 1) * size > len(chain.tokens):
        return HitEnd.NOT_CACHED
    cursor = groups[0].pool.index.tree.match(chain, block_idx + 1)
    if cursor.num_known > block_idx:
        node, position = node_position = cursor.position(block_idx)
        if any(group.pool.index.at(node_position) for group in groups):
            return HitEnd.GROUP
        if position not in node.never_published:
            return HitEnd.EVICTED
    return HitEnd.NOT_CACHED
