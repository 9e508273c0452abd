"""The number and lengths of sequences that fit into a KV cache of some size, without an engine: arithmetic only.

It uses the manager's specs and slab layout, so that a plan and the engine that is built from it agree to the byte:

```
 budget  ->  arena_bytes  ->  SlabLayout  ->  blocks of each group  ->  sequences at once, the longest sequence
```
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from quire.memory.pool.slab_layout import SlabLayout, lay_out
from quire.memory.specs import KVCacheSpec
from quire.memory.tables.snapshots import DEFAULT_SNAPSHOT_INTERVAL


class Shortage(NamedTuple):
    """The reason why a sequence never fits.

    Args:
        group_idx: cache group that takes most of the memory.
        needed: number of slabs that all groups together need at the peak.
        available: number of slabs of the arena.
    """

    group_idx: int
    needed: int
    available: int


def arena_bytes(specs: Sequence[KVCacheSpec], num_blocks: int) -> int:
    """Return the bytes of the arena: `num_blocks` blocks and a null block of each token group.

    States of recurrent groups are in the same bytes.
    """
    return (num_blocks + 1) * tokens_bytes(specs)


def tokens_bytes(specs: Sequence[KVCacheSpec]) -> int:
    """Return the bytes of one block of every token group."""
    return sum(spec.bytes_per_block for spec in specs if not spec.is_recurrent)


def least_host_bytes(specs: Sequence[KVCacheSpec]) -> int:
    """Return the minimum bytes of a host tier: null blocks, and a slab or a block of every group, whichever is more."""
    units = [spec.bytes_per_block for spec in specs]
    return max(2 * sum(units), lay_out(units, num_slabs=1).num_bytes)


def peak_blocks_per_group(
    specs: Sequence[KVCacheSpec],
    num_tokens: int,
    layout: SlabLayout,
    num_slabs: int,
    *,
    width: int = 1,
    num_shared: int = 0,
) -> list[int] | None:
    """Return each group's number of blocks at the peak of a sequence alone, one token a step; None if it fits.

    A peak is a length at which a new block has just begun. Full attention only grows; windows and chunks repeat with a
    period: so the last period of such lengths is checked, and nothing if the sum of the groups' peaks fits. Several
    sequences with a common prefix (beams) leave their shared blocks as windows slide: their peak is also in the last
    period, or at the end of the prefix.
    """
    if layout.num_filled([width * spec.peak_blocks(num_tokens, 1) for spec in specs]) <= num_slabs:
        return None
    size = specs[0].block_size
    last = (num_tokens - 1) // size
    period = lcm(*(spec.period for spec in specs))
    moments = [block_idx * size for block_idx in range(max(0, last - period + 1), last + 1)]
    if width > 1:
        moments.append(num_shared)
    block_counts = [[_held_at(spec, moment, width, num_shared) for spec in specs] for moment in moments]
    worst = max(block_counts, key=layout.num_filled)
    return worst if layout.num_filled(worst) > num_slabs else None


def _held_at(spec: KVCacheSpec, num_computed: int, width: int, num_shared: int) -> int:
    """Return the blocks of a group for `num_computed + 1` tokens of `width` sequences with a common prefix."""
    size = spec.block_size
    last = num_computed // size
    # A recurrent state moves to the new block when one begins.
    first = spec.first_live_token(num_computed + spec.is_recurrent) // size
    if num_computed < num_shared:
        return last + 1 - first
    shared = 0 if spec.is_recurrent else max(0, num_shared // size - first)
    return shared + width * (last + 1 - first - shared)


def sequence_bytes(specs: Sequence[KVCacheSpec], num_tokens: int) -> int:
    """Return the bytes of each group's peak, summed, for a sequence that grows to `num_tokens`, one token a step."""
    return sum(spec.peak_blocks(num_tokens, 1) * spec.bytes_per_block for spec in specs)


def most_bytes(specs: Sequence[KVCacheSpec], num_tokens: int, num_seqs: int, interval: int | None = None) -> int | None:
    """Return the bytes of an arena that `num_seqs` sequences of `num_tokens` tokens fill completely.

    A sequence has its present state, the snapshot close to the end of its prompt, and the regular snapshots.

    Args:
        interval: number of tokens between regular snapshots; None for the default.

    Returns:
        None without recurrent groups: then the blocks of all tokens determine the bytes.
    """
    if not any(spec.is_recurrent for spec in specs):
        return None
    layout = lay_out([spec.bytes_per_block for spec in specs], num_slabs=1)
    num_states = 2 + num_tokens // (interval or DEFAULT_SNAPSHOT_INTERVAL)
    needs = [num_seqs * (num_states if spec.is_recurrent else spec.num_blocks(num_tokens)) for spec in specs]
    return layout._replace(num_slabs=layout.num_filled(needs)).num_bytes


@dataclass(frozen=True, slots=True)
class ArenaSizing:
    """The cache groups of a model in an arena of some size.

    Args:
        specs: specs of the groups, with one block size.
        layout: layout of the arena; without slabs if the bytes hold none.
    """

    specs: tuple[KVCacheSpec, ...]
    layout: SlabLayout

    @classmethod
    def of(cls, specs: Sequence[KVCacheSpec], num_bytes: int) -> ArenaSizing:
        """Lay out an arena of `num_bytes` bytes, null blocks included."""
        units = [spec.bytes_per_block for spec in specs]
        layout = lay_out(units, num_slabs=1)
        if num_bytes < layout.num_bytes:
            layout = layout._replace(num_slabs=0)
        else:
            layout = lay_out(units, num_bytes=num_bytes)
        return cls(tuple(specs), layout)

    @property
    def num_bytes(self) -> int:
        """Bytes of the null blocks and all slabs; 0 without a slab."""
        return self.layout.num_bytes if self.layout.num_slabs else 0

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Number of blocks of each group, if that group had all slabs."""
        return tuple(count * self.layout.num_slabs for count in self.layout.blocks_per_slab)

    def concurrency(self, num_tokens: int, *, step_tokens: int = 1, num_kept_free: int = 0) -> int:
        """Return how many sequences of `num_tokens` tokens, without shared blocks, admission lets run at once.

        The last one's prompt is computed in chunks of `step_tokens`, for which a windowed group holds more blocks; the
        others decode one token a step. One sequence alone may take all memory, in shorter steps. While windows or
        chunks begin at block boundaries, sequences hold less, and more of them may run.

        Args:
            num_tokens: length that each sequence reaches.
            step_tokens: maximum number of tokens of a step.
            num_kept_free: number of slabs that an admission leaves free while other sequences live (the watermark).
        """
        if self.shortage(num_tokens) is not None:
            return 0
        other_peaks = [spec.peak_blocks(num_tokens, 1) for spec in self.specs]
        peaks = [spec.peak_blocks(num_tokens, step_tokens) for spec in self.specs]
        num_slabs = self.layout.num_slabs - num_kept_free
        most = max(1, *self.num_blocks)
        # The maximum number of other sequences beside which one more fits.
        num_others = bisect_left(
            range(1, most + 1),
            True,
            key=lambda count: self._num_filled_beside(count, other_peaks, peaks) > num_slabs,
        )
        return 1 + num_others

    def _num_filled_beside(self, num_others: int, other_peaks: Sequence[int], peaks: Sequence[int]) -> int:
        """Return the slabs that a sequence at its peak and `num_others` others, with `other_peaks` blocks, fill."""
        return self.layout.num_filled(
            [num_others * other_peak + peak for other_peak, peak in zip(other_peaks, peaks, strict=True)]
        )

    def shortage(self, num_tokens: int) -> Shortage | None:
        """Return why a sequence alone, one token a step, could not reach a length; None if it can."""
        worst = peak_blocks_per_group(self.specs, num_tokens, self.layout, self.layout.num_slabs)
        if worst is None:
            return None
        group_bytes = [count * spec.bytes_per_block for count, spec in zip(worst, self.specs, strict=True)]
        return Shortage(group_bytes.index(max(group_bytes)), self.layout.num_filled(worst), self.layout.num_slabs)

    def longest(self, limit: int) -> int:
        """Return the length of the longest sequence, at most `limit`, that fits alone; 0 if none fits."""
        return bisect_left(range(1, limit + 1), True, key=lambda length: self.shortage(length) is not None)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of the smallest arena that holds a sequence of `num_tokens` tokens."""
        most = self.layout.num_filled([spec.peak_blocks(num_tokens, 1) for spec in self.specs])
        num_slabs = 1 + bisect_left(
            range(1, most),
            True,
            key=lambda count: replace(self, layout=self.layout._replace(num_slabs=count)).shortage(num_tokens) is None,
        )
        return self.layout._replace(num_slabs=num_slabs).num_bytes
