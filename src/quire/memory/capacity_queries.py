"""Capacity queries: whether sequences would fit, and the memory that they would take or release."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.capacity.admission import Release, check_admission, measure_release, never_fits
from quire.memory.results import AllocStatus, PrefixHit, Tier
from quire.memory.tables.tables import BlockTables
from quire.memory.tiers import swap
from quire.memory.tiers.swap import SwapSize


class CapacityQueries:
    """Capacity queries; a query may cache, but changes no later answer and no later command."""

    __slots__ = ("_known_to_fit", "_num_slabs", "_tables", "_watermark")

    def __init__(self, tables: BlockTables, watermark: int, num_slabs: int) -> None:
        self._tables = tables
        self._watermark = watermark
        self._num_slabs = num_slabs
        # Maximum length that was found to fit alone: shorter sequences fit too.
        self._known_to_fit = 0

    def can_allocate(
        self, num_tokens: int, hit: PrefixHit, step_tokens: int | None = None, reserved: Sequence[int] = ()
    ) -> AllocStatus:
        """Return whether a new sequence of `num_tokens` tokens can be opened on a hit and grow to that length.

        While other sequences are live, `watermark` slabs and the `reserved` blocks must stay free for their growth;
        alone, a sequence may take all memory, so that no sequence that fits waits forever.
        """
        refusal = self._never_fits(num_tokens)
        if refusal is not None:
            return refusal
        arena, groups = self._tables.arena, self._tables.groups
        return check_admission(
            arena, groups, num_tokens, hit, step_tokens or num_tokens, *self._reserved_for_others(reserved)
        )

    def can_ever_hold(self, num_tokens: int, *, width: int = 1, num_shared: int = 0) -> bool:
        """Return whether `width` sequences could ever reach `num_tokens` tokens: alone, and one token a step."""
        if width == 1:
            return self._never_fits(num_tokens) is None
        arena, groups = self._tables.arena, self._tables.groups
        refusal = never_fits(arena, groups, num_tokens, self._num_slabs, width=width, num_shared=num_shared)
        return refusal is None

    def can_step(self, num_tokens: int, step_tokens: int) -> bool:
        """Return whether a sequence alone surely reaches `num_tokens` tokens with steps of `step_tokens`."""
        blocks = [group.spec.peak_blocks(num_tokens, step_tokens) for group in self._tables.groups]
        return self._tables.arena.layout.num_filled(blocks) <= self._num_slabs

    def blocks_missing(self, seq_id: int, num_tokens: int, step_tokens: int | None = None) -> tuple[int, ...]:
        """Return the number of blocks of each group that a live sequence still needs to reach `num_tokens` tokens."""
        state = self._tables.resident(seq_id)
        missing = []
        for group, table, num_skipped in zip(self._tables.groups, state.tables, state.num_skipped, strict=True):
            if group.spec.is_recurrent:
                # The next step copies a state that has another holder.
                missing.append(int(not table or group.pool.ref_counts[table[-1]] > 1))
                continue
            more = group.spec.peak_blocks(num_tokens, step_tokens or num_tokens) - (len(table) - num_skipped)
            missing.append(max(0, min(more, group.spec.num_blocks(num_tokens) - len(table))))
        return tuple(missing)

    def can_swap_out(self, seq_ids: Sequence[int]) -> AllocStatus:
        """Return whether the host has room for sequences: LATER if other blocks take it, NEVER if it is too small."""
        return swap.check_swap_out(self._tables, self._tables.siblings(seq_ids, Tier.DEVICE))

    def can_swap_in(
        self,
        seq_ids: Sequence[int],
        num_tokens: Sequence[int],
        step_tokens: int | None = None,
        reserved: Sequence[int] = (),
    ) -> AllocStatus:
        """Return whether swapped-out sequences can be swapped in together and grow to the given lengths.

        NEVER if they do not fit even alone, with steps of `step_tokens`.
        """
        states = self._tables.siblings(seq_ids, Tier.HOST)
        others = self._reserved_for_others(reserved)
        return swap.check_swap_in(self._tables, states, num_tokens, step_tokens, *others, self._num_slabs)

    def swap_size(self, seq_ids: Sequence[int]) -> SwapSize:
        """Return the size of the copies that would swap the sequences, out or in, at present."""
        tier = Tier.HOST if any(self._tables.sequences[seq_id].is_swapped for seq_id in seq_ids) else Tier.DEVICE
        return swap.measure_swap(self._tables, self._tables.siblings(seq_ids, tier), tier)

    def would_release(self, seq_ids: Sequence[int]) -> Release:
        """Return the memory that releasing these sequences would free, and the computed tokens it would lose."""
        return measure_release(self._tables.groups, [self._tables.sequences[seq_id] for seq_id in seq_ids])

    def _never_fits(self, num_tokens: int) -> AllocStatus | None:
        if num_tokens <= self._known_to_fit:
            return None
        refusal = never_fits(self._tables.arena, self._tables.groups, num_tokens, self._num_slabs)
        if refusal is None:
            self._known_to_fit = num_tokens
        return refusal

    def _reserved_for_others(self, reserved: Sequence[int]) -> tuple[Sequence[int], int]:
        """Return the numbers of blocks of each group, and of slabs, that stay free for sequences on the device.

        The watermark is in slabs, so that it is a share of the bytes: a state has the bytes of hundreds of blocks.
        """
        none = [0] * len(self._tables.groups)
        if len(self._tables.sequences) == (self._tables.host.num_sequences if self._tables.host else 0):
            return none, 0
        return reserved or none, self._watermark
