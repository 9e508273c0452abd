"""A slow twin of the memory manager, made of plain token lists: no block ids, no tables, no digests.

A page is an object; who holds it is found by looking at every sequence. A page is published under the whole prefix
that it ends. The twin says exactly what the manager must answer: hit lengths, verdicts, refusals, counts, the order of
eviction, and which sequences share which pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from quire.memory import Namespace
from tests.memory.twin_hits import longest
from tests.memory.twin_keeping import (
    GoesFirst,
    evict_last,
    is_read_at_a_parting,
    keep_for_next_turn,
    publish_tail,
    supersede,
)
from tests.memory.twin_pages import Kind, Match, Page, Pages, Prefix, TwinGroup, TwinSequence

if TYPE_CHECKING:
    from tests.memory.host_twin import HostTwin


class Twin:
    """What a KV cache manager must do whose groups share pages of one size, found out the slow way.

    Args:
        num_pages: for each group, shared by all.
        pin_limit, retention_limit: pages of all groups.
        interval: tokens between regular snapshots of states.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        kinds: tuple[Kind, ...],
        *,
        watermark: int,
        caching: bool,
        pin_limit: int = 0,
        retention_limit: int = 0,
        interval: int | None = None,
    ) -> None:
        self.num_pages = num_pages * len(kinds)
        self.pin_limit = pin_limit
        self.retention_limit = retention_limit
        self.pins: dict[str, list[Pages]] = {}
        # The pages that are to be evicted last, the oldest hint first.
        self.hints: list[tuple[int, Page]] = []
        self.page_size = page_size
        self.watermark = watermark
        self.caching = caching
        self.interval = interval or -(-512 // page_size) * page_size
        self.groups = [TwinGroup(kind) for kind in kinds]
        self.kept = [idx for idx, kind in enumerate(kinds) if not kind.is_state]
        self.states = [idx for idx, kind in enumerate(kinds) if kind.is_state]
        self.sequences: dict[int, TwinSequence] = {}
        self.clock = 0
        self.departed: set[Prefix] = set()
        self.num_copies = 0
        self.num_merges = 0
        self.num_evictions = 0
        self.host: HostTwin | None = None

    # ---- questions ----

    def num_holders(self, page: Page) -> int:
        """Count the places that name a page."""
        return sum(held is page for idx in range(len(self.groups)) for pages in self._holders(idx) for held in pages)

    def num_used(self, idx: int) -> int:
        """Count the pages of a group that some sequence or pin holds."""
        return len({id(page) for pages in self._holders(idx) for page in pages if page})

    def _holders(self, idx: int) -> list[Pages]:
        sequences = [sequence.held(idx) for sequence in self.sequences.values()]
        return [*sequences, *(tables[idx] for tables in self.pins.values())]

    def num_available(self) -> int:
        """Count the pages that could be handed out."""
        return self.num_pages - sum(map(self.num_used, range(len(self.groups))))

    def num_pages_of(self, num_tokens: int) -> int:
        """Return the number of pages that a number of tokens fills."""
        return (num_tokens + self.page_size - 1) // self.page_size

    def is_alive(self, idx: int, page_idx: int, num_computed: int) -> bool:
        """Tell whether a token of a page is read by the next query, or is not computed yet."""
        first = page_idx * self.page_size
        return any(
            token >= num_computed or self.groups[idx].kind.reads(num_computed, token)
            for token in range(first, first + self.page_size)
        )

    def alive(self, idx: int, num_computed: int, num_slots: int) -> list[int]:
        """Return the pages of a group that a sequence holds, by its computed tokens and slots."""
        num_pages = self.num_pages_of(num_slots)
        if idx in self.states:
            return [num_pages - 1] if num_pages else []
        return [i for i in range(num_pages) if self.is_alive(idx, i, num_computed)]

    def is_on_host(self, idx: int, page: Page | None) -> bool:
        """Tell whether a page that was found is one of the host's."""
        return self.host is not None and page in self.host.groups[idx].published.values()

    def step_limit(self, seq_id: int, num_tokens: int) -> int:
        """Return how many tokens come before the next snapshot, that one included."""
        sequence = self.sequences[seq_id]
        if not self.states or not self.caching or not sequence.is_publishing:
            return num_tokens
        start = sequence.num_slots
        due = (count for count in range(1, num_tokens) if self._is_due(sequence, start + count))
        return next(due, num_tokens)

    def _is_due(self, sequence: TwinSequence, num_tokens: int) -> bool:
        return num_tokens % self.interval == 0 or num_tokens in sequence.snapshot_points

    # ---- commands ----

    def open(self, seq_id: int, namespace: Namespace, tokens: list[int], hit: Match, diverged_at: int = 0) -> None:
        """Open a sequence on a hit; states will be published before the prompt's end and where it was seen to part."""
        for group, pages in zip(self.groups, hit.pages, strict=True):
            group.idle = [page for page in group.idle if page not in pages]
        mine = [[None if self.is_on_host(idx, page) else page for page in pages] for idx, pages in enumerate(hit.pages)]
        sequence = TwinSequence(namespace, tokens, mine, hit.num_tokens)
        last = (len(tokens) - 1) // self.page_size * self.page_size
        sequence.snapshot_points = {stop for stop in (last, diverged_at) if stop > hit.num_tokens and self.states}
        sequence.branch_points = {last // self.page_size, diverged_at // self.page_size}
        sequence.opened_on = hit.num_tokens
        self.sequences[seq_id] = sequence
        if self.host is not None:
            self.host.load_hit(seq_id, hit.pages)

    def append_all(self, seq_ids: Sequence[int]) -> bool:
        """Give a slot more to each, or to none: found out by trying, on a copy."""
        trial = deepcopy(self)
        num_before = trial.num_available()
        if not all(trial.append(seq_id, 1, may_copy_published=False) for seq_id in seq_ids):
            return False
        num_taken = num_before - trial.num_available()
        has_plenty = num_before >= num_taken + len(seq_ids) * len(self.groups)
        return all(self.append(seq_id, 1, may_copy_published=has_plenty) for seq_id in seq_ids)

    def append(self, seq_id: int, num_tokens: int, lookahead: int = 0, *, may_copy_published: bool = True) -> bool:
        """Give slots, or change nothing and return False."""
        sequence = self.sequences[seq_id]
        end = sequence.num_slots + num_tokens + lookahead
        tails = [pages[-1] if pages else None for pages in sequence.pages]
        is_tail_written = sequence.num_slots % self.page_size > 0
        written = [idx for idx in self.kept if is_tail_written] + [idx for idx in self.states if tails[idx] is not None]
        is_held = lookahead > 0 and bool(self.states) and sequence.checkpoint is None
        held = {idx: page for idx in self.states if (page := tails[idx]) and is_held and sequence.num_computed}
        copied = [idx for idx in written if idx in held or self.num_holders(tails[idx]) > 1]  # type: ignore[arg-type]
        snapshots = [idx for idx in self.states if idx not in copied and tails[idx] and tails[idx].prefix]  # type: ignore[union-attr]
        fresh = [self.num_pages_of(end) - len(pages) for pages in sequence.pages]
        for idx in self.states:
            fresh[idx] = int(tails[idx] is None)
        if sum(fresh) + len(copied) > self.num_available():
            return False
        for idx in written:
            page = tails[idx]
            if idx not in copied and idx in self.kept and page and page.prefix:
                # What is published stays so where there is room; a tail of which nothing would be lost need not.
                snapshots += [idx] if sequence.num_slots < len(page.prefix[1]) else []
        if may_copy_published and sum(fresh) + len(copied) + len(snapshots) <= self.num_available():
            copied = sorted(copied + snapshots)
        sequence.num_slots = end
        if is_held:
            sequence.checkpoint = sequence.num_computed, held
        for idx in written:
            page = tails[idx]
            if idx not in copied and page is not None and page.prefix is not None:
                self._unpublish(idx, page)
        for idx in copied:
            pages = sequence.pages[idx]
            pages[-1] = self._take()
            self._rest(idx, tails[idx])  # type: ignore[arg-type]
            self.num_copies += 1
        for idx, pages in enumerate(sequence.pages):
            for _ in range(fresh[idx]):
                pages.append(self._take())
        for idx in self.states:
            sequence.pages[idx] = [*[None] * (self.num_pages_of(end) - 1), *sequence.pages[idx][-1:]]
        return True

    def store(self, seq_id: int, num_computed: int, goes_first: GoesFirst) -> None:
        """Note that tokens are stored; full pages are published, or replaced by those that are; dead ones go.

        Args:
            seq_id: the sequence.
            num_computed: its stored tokens.
            goes_first: says of a group and a page whether the manager evicts it first, where either may be right: of
                what is gone the manager remembers some.
        """
        sequence = self.sequences[seq_id]
        is_new = num_computed > sequence.num_computed
        sequence.num_computed = num_computed
        self._drop_checkpoint(sequence)
        if self.caching and sequence.is_publishing:
            for i in range(num_computed // self.page_size):
                for idx in self.kept:
                    self._publish(sequence, idx, i)
            if is_new and num_computed == sequence.num_slots and self._is_due(sequence, num_computed):
                for idx in self.states:
                    self._publish(sequence, idx, num_computed // self.page_size - 1)
                supersede(self, sequence, goes_first)
        for idx in self.kept:
            pages = sequence.pages[idx]
            dead = [i for i, page in enumerate(pages) if page is not None and not self.is_alive(idx, i, num_computed)]
            last = num_computed // self.page_size - 1
            is_kept = {i: is_read_at_a_parting(self, sequence, idx, i, last, goes_first) for i in dead}
            for i in sorted(dead, key=lambda i: (is_kept[i], i)):
                page, pages[i] = pages[i], None
                assert page is not None
                self._rest(idx, page, goes_first=not is_kept[i])

    def _publish(self, sequence: TwinSequence, idx: int, i: int) -> None:
        """Publish a full page, or take the one that is published instead."""
        prefix = (sequence.namespace, tuple(sequence.tokens[: (i + 1) * self.page_size]))
        group, page = self.groups[idx], sequence.pages[idx][i]
        known = group.published.get(prefix)
        if page is not None and known is None:
            page.prefix = prefix
            group.published[prefix] = page
        elif page is not None and known is not page and known is not None:
            if known in group.idle:
                group.idle.remove(known)
            sequence.pages[idx][i] = known
            self.num_merges += 1

    def fork(self, parent_id: int, child_id: int, tokens: list[int]) -> None:
        """Open a child on all of its parent's pages."""
        parent = self.sequences[parent_id]
        pages = [list(pages) for pages in parent.pages]
        self.sequences[child_id] = TwinSequence(parent.namespace, tokens, pages, parent.num_slots)
        self.sequences[child_id].is_publishing = parent.is_publishing
        self.sequences[child_id].snapshot_points = set(parent.snapshot_points)
        for name in ("branch_points", "opened_on", "regular"):
            setattr(self.sequences[child_id], name, getattr(parent, name))

    def can_truncate(self, seq_id: int, num_tokens: int) -> bool:
        """Tell whether all that the next query would read is still there."""
        sequence = self.sequences[seq_id]
        kept_states = {sequence.num_slots, sequence.checkpoint[0] if sequence.checkpoint else sequence.num_slots}
        if self.states and num_tokens not in kept_states:
            return False
        return all(
            page is not None or not self.is_alive(idx, i, min(num_tokens, sequence.num_computed))
            for idx, pages in enumerate(sequence.pages)
            if idx in self.kept
            for i, page in enumerate(pages)
        )

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Take slots back."""
        sequence = self.sequences[seq_id]
        is_going_back = num_tokens < sequence.num_slots
        sequence.num_slots = num_tokens
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        self._give_back(sequence, self.kept, self.num_pages_of(num_tokens))
        if is_going_back and sequence.checkpoint is not None:
            self._give_back(sequence, self.states, 0)
            for idx, page in sequence.checkpoint[1].items():
                sequence.pages[idx] = [None] * (self.num_pages_of(num_tokens) - 1) + [page]
            sequence.checkpoint = None

    def free(self, seq_id: int, *, retain: bool = False, is_sound: bool = True) -> None:
        """Release a sequence, its tail first, which is published if that is of any use."""
        sequence = self.sequences[seq_id]
        is_on_device = self.host is None or seq_id not in self.host.tables
        if is_sound and is_on_device:
            publish_tail(self, sequence)
            keep_for_next_turn(self, sequence)
        if retain and self.retention_limit:
            evict_last(self, sequence.pages)
        self.release(sequence)
        self._drop_checkpoint(sequence)
        del self.sequences[seq_id]
        if self.host is not None and seq_id in self.host.tables:
            self.host.leave(seq_id)

    def reset(self) -> None:
        """Forget all published pages; live sequences publish no more."""
        for idx, group in enumerate(self.groups):
            for page in list(group.published.values()):
                self._unpublish(idx, page)
            group.idle = []
        self.departed.clear()
        for sequence in self.sequences.values():
            sequence.is_publishing = False
        if self.host is not None:
            self.host.reset()
        self.pins = {}

    def pin(self, name: str, namespace: Namespace, tokens: list[int]) -> int:
        """Hold the longest published prefix, unless that is too much; return its tokens."""
        # Only what is on the device can be held there.
        host, self.host = self.host, None
        pages = longest(self, namespace, tokens, len(tokens), range(len(self.groups)))
        self.host = host
        held = {page for table in [*pages, *(table for pin in self.pins.values() for table in pin)] for page in table}
        if not pages[0] or len(held - {None}) > self.pin_limit:
            return 0
        for group, table in zip(self.groups, pages, strict=True):
            group.idle = [page for page in group.idle if page not in table]
        self.pins[name] = pages
        return len(pages[0]) * self.page_size

    def unpin(self, name: str) -> None:
        """Let go of a pin, its tail first."""
        pages = self.pins.pop(name)
        for idx, table in enumerate(pages):
            for page in reversed(table):
                if page is not None:
                    self._rest(idx, page)

    # ---- steps of commands ----

    def _drop_checkpoint(self, sequence: TwinSequence) -> None:
        if sequence.checkpoint is not None:
            _, pages = sequence.checkpoint
            sequence.checkpoint = None
            for idx, page in pages.items():
                self._rest(idx, page)

    def _give_back(self, sequence: TwinSequence, members: Sequence[int], keep: int) -> None:
        for idx in members:
            pages = sequence.pages[idx]
            while len(pages) > keep:
                page = pages.pop()
                if page is not None:
                    self._rest(idx, page)

    def release(self, sequence: TwinSequence) -> None:
        """Give back all pages of a sequence, the tail of all groups first."""
        for i in reversed(range(max(map(len, sequence.pages), default=0))):
            for idx, pages in enumerate(sequence.pages):
                page = pages.pop() if i < len(pages) else None
                if page is not None:
                    self._rest(idx, page)

    def _rest(self, idx: int, page: Page, *, goes_first: bool = False) -> None:
        """Make a page idle that has lost a holder, if it was the last and the page is published."""
        if page.prefix is not None and self.num_holders(page) == 0:
            self.groups[idx].idle.append(page)
            self.clock += 1
            page.idle_since = self.clock
            page.goes_first = goes_first
            if goes_first:
                page.goes_last = False
                self.hints = [hint for hint in self.hints if hint[1] is not page]

    def rest_anew(self, idx: int, page: Page, *, goes_first: bool = False) -> None:
        """Have an idle page count as if it had just become so."""
        self.groups[idx].idle.remove(page)
        self._rest(idx, page, goes_first=goes_first)

    def _take(self) -> Page:
        """Return a new page, for which the oldest idle one of all groups may have to go."""
        if self.num_available() == sum(len(group.idle) for group in self.groups):
            _, other = min((page.turn, other) for other, group in enumerate(self.groups) for page in group.idle)
            victim = self.groups[other].by_turn[0]
            self.groups[other].idle.remove(victim)
            if self.host is not None and victim.prefix is not None and not victim.goes_first:
                self.host.keep(other, victim.prefix)
            self._unpublish(other, victim)
            self.num_evictions += 1
        return Page()

    def _unpublish(self, idx: int, page: Page) -> None:
        assert page.prefix is not None
        self.departed.add(page.prefix)
        del self.groups[idx].published[page.prefix]
        page.prefix = None
        page.goes_last = False
        self.hints = [hint for hint in self.hints if hint[1] is not page]
