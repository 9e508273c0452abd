"""A slow twin of the memory manager, made of plain token lists: no block ids, no tables, no digests.

A page is an object; who holds it is found by looking at every sequence. A page is published under the whole prefix
that it ends. The twin says exactly what the manager must answer: hit lengths, verdicts, refusals, counts, the order of
eviction, and which sequences share which pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from quire.memory import Namespace

Prefix = tuple[Namespace, tuple[int, ...]]


class Kind(NamedTuple):
    """What the queries of a cache group read.

    Args:
        name: "full", "window", "chunk", or "state" for what sums all tokens up in its last page.
        extent: tokens of the window or of a chunk.
    """

    name: str = "full"
    extent: int = 0

    @property
    def is_state(self) -> bool:
        """Tell whether one page is all there is."""
        return self.name == "state"

    def reads(self, query: int, token: int) -> bool:
        """Tell whether the query at one position reads the token at another, not later, one."""
        if self.name == "window":
            return query - token < self.extent
        if self.name == "chunk":
            return query // self.extent == token // self.extent
        return True


class Page:
    """Room for one block's worth of tokens; equal only to itself."""

    __slots__ = ("idle_since", "prefix")

    def __init__(self) -> None:
        self.prefix: Prefix | None = None
        self.idle_since = 0


# A dead page, of which nothing is left, is None.
Pages = list[Page | None]


class TwinGroup:
    """The pages of one cache group that are published, and those of them that nobody holds, the oldest first."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.published: dict[Prefix, Page] = {}
        self.idle: list[Page] = []


class TwinSequence:
    """A sequence as its owner sees it, and its pages in each group."""

    def __init__(self, namespace: Namespace, tokens: list[int], pages: list[Pages], num_slots: int) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.pages = pages
        self.num_slots = num_slots
        self.num_computed = num_slots
        self.is_publishing = True
        # Lengths at which states are published besides the regular ones.
        self.stops: set[int] = set()
        # The length to go back to, and by group the pages that are held for it.
        self.checkpoint: tuple[int, dict[int, Page]] | None = None

    def held(self, idx: int) -> Pages:
        """Return the pages of a group that the sequence holds."""
        spare = self.checkpoint[1] if self.checkpoint else {}
        return [*self.pages[idx], *([spare[idx]] if idx in spare else [])]


class Twin:
    """What a KV cache manager must do whose groups share pages of one size, found out the slow way.

    Args:
        num_pages: for each group, shared by all.
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
        interval: int | None = None,
    ) -> None:
        self.num_pages = num_pages * len(kinds)
        self.page_size = page_size
        self.watermark = watermark
        self.caching = caching
        self.interval = interval or -(-512 // page_size) * page_size
        self.groups = [TwinGroup(kind) for kind in kinds]
        self.kept = [idx for idx, kind in enumerate(kinds) if not kind.is_state]
        self.states = [idx for idx, kind in enumerate(kinds) if kind.is_state]
        self.sequences: dict[int, TwinSequence] = {}
        self.clock = 0
        self.num_copies = 0
        self.num_merges = 0
        self.num_evictions = 0

    # ---- questions ----

    def num_holders(self, page: Page) -> int:
        """Count the places that name a page."""
        groups = range(len(self.groups))
        return sum(held is page for seq in self.sequences.values() for idx in groups for held in seq.held(idx))

    def num_used(self, idx: int) -> int:
        """Count the pages of a group that some sequence holds."""
        return len({id(page) for sequence in self.sequences.values() for page in sequence.held(idx) if page})

    def num_available(self) -> int:
        """Count the pages that could be handed out."""
        return self.num_pages - sum(map(self.num_used, range(len(self.groups))))

    def num_pages_of(self, num_tokens: int) -> int:
        """Count the pages that hold so many tokens."""
        return (num_tokens + self.page_size - 1) // self.page_size

    def is_alive(self, idx: int, page_idx: int, num_computed: int) -> bool:
        """Tell whether a token of a page is read by the next query, or is not computed yet."""
        first = page_idx * self.page_size
        return any(
            token >= num_computed or self.groups[idx].kind.reads(num_computed, token)
            for token in range(first, first + self.page_size)
        )

    def alive(self, idx: int, num_computed: int, num_slots: int) -> list[int]:
        """Return which pages are held of a group with so many tokens computed and so many slots."""
        num_pages = self.num_pages_of(num_slots)
        if idx in self.states:
            return [num_pages - 1] if num_pages else []
        return [i for i in range(num_pages) if self.is_alive(idx, i, num_computed)]

    def match(self, namespace: Namespace, tokens: list[int], max_tokens: int | None) -> list[Pages]:
        """Return the pages of the longest prefix that leaves a token to compute and whose live pages are published."""
        return self._longest(namespace, tokens, max_tokens, range(len(self.groups)))

    def parted_at(self, namespace: Namespace, tokens: list[int], max_tokens: int | None) -> int:
        """Return the tokens of the hit that there would be without groups of states, 0 if it is no longer one."""
        if not self.states or not self.kept:
            return 0
        longest = len(self._longest(namespace, tokens, max_tokens, self.kept)[0])
        found = len(self.match(namespace, tokens, max_tokens)[0])
        return longest * self.page_size if longest > found else 0

    def _longest(
        self, namespace: Namespace, tokens: list[int], max_tokens: int | None, members: Sequence[int]
    ) -> list[Pages]:
        most = (len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)) // self.page_size
        for length in range(most if self.caching else 0, 0, -1):
            hit = [self._hit(namespace, tokens, idx, length) for idx in members]
            if all(page_idx is not None for page_idx in hit):
                return [pages for pages in hit if pages is not None]
        return [[] for _ in members]

    def _hit(self, namespace: Namespace, tokens: list[int], idx: int, length: int) -> Pages | None:
        pages: Pages = []
        alive = self.alive(idx, length * self.page_size, length * self.page_size)
        for i in range(length):
            if i in alive:
                page = self.groups[idx].published.get((namespace, tuple(tokens[: (i + 1) * self.page_size])))
                if page is None:
                    return None
                pages.append(page)
            else:
                pages.append(None)
        return pages

    def peak(self, idx: int, num_tokens: int, step: int) -> int:
        """Return the most pages of a group that a sequence holds at once, trying every way to cut it into steps."""
        return max(
            len(self.alive(idx, done, done + count))
            for done, count in product(range(num_tokens), range(1, step + 1))
            if done + count <= num_tokens
        )

    def joint_peak(self, num_tokens: int) -> int:
        """Return the most pages of all groups that a sequence holds at once when it grows token by token."""
        return max(
            sum(len(self.alive(idx, done, done + 1)) for idx in range(len(self.groups))) for done in range(num_tokens)
        )

    def least_needed(self, idx: int, num_tokens: int, hit: Pages, step: int) -> int:
        """Return the pages that a sequence needs beyond the idle ones of its hit, at the worst moment."""
        start = len(hit) * self.page_size
        idle = self.groups[idx].idle
        num_idle = sum(page in idle for page in hit)
        most = 0
        for done, count in product(range(start, num_tokens), range(1, step + 1)):
            if done + count <= num_tokens:
                alive = self.alive(idx, done, done + count)
                most = max(most, sum(i >= len(hit) or hit[i] in idle for i in alive))
        return most - num_idle

    def step_limit(self, seq_id: int, num_tokens: int) -> int:
        """Return how many tokens come before the next snapshot, that one included."""
        sequence = self.sequences[seq_id]
        if not self.states or not self.caching or not sequence.is_publishing:
            return num_tokens
        start = sequence.num_slots
        due = (count for count in range(1, num_tokens) if self._is_due(sequence, start + count))
        return next(due, num_tokens)

    def _is_due(self, sequence: TwinSequence, num_tokens: int) -> bool:
        return num_tokens % self.interval == 0 or num_tokens in sequence.stops

    # ---- commands ----

    def open(self, seq_id: int, namespace: Namespace, tokens: list[int], hit: list[Pages], parted_at: int = 0) -> None:
        """Open a sequence on a hit; states will be published before the prompt's end and where it was seen to part."""
        for group, pages in zip(self.groups, hit, strict=True):
            group.idle = [page for page in group.idle if page not in pages]
        num_slots = len(hit[0]) * self.page_size
        sequence = TwinSequence(namespace, tokens, [list(pages) for pages in hit], num_slots)
        last = (len(tokens) - 1) // self.page_size * self.page_size
        sequence.stops = {stop for stop in (last, parted_at) if stop > num_slots and self.states}
        self.sequences[seq_id] = sequence

    def append(self, seq_id: int, num_tokens: int, lookahead: int = 0) -> bool:
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
        if sum(fresh) + len(copied) + len(snapshots) <= self.num_available():
            copied += snapshots
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
            sequence.pages[idx] = [None] * (self.num_pages_of(end) - 1) + sequence.pages[idx][-1:]
        return True

    def store(self, seq_id: int, num_computed: int) -> None:
        """Note that tokens are stored; full pages are published, or replaced by those that are; dead ones go."""
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
        for idx in self.kept:
            pages = sequence.pages[idx]
            for i, page in enumerate(pages):
                if page is not None and not self.is_alive(idx, i, num_computed):
                    pages[i] = None
                    self._rest(idx, page)

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
        self.sequences[child_id].stops = set(parent.stops)

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

    def free(self, seq_id: int) -> None:
        """Release a sequence, its tail first."""
        sequence = self.sequences[seq_id]
        self._give_back(sequence, range(len(self.groups)), 0)
        self._drop_checkpoint(sequence)
        del self.sequences[seq_id]

    def reset(self) -> None:
        """Forget what is published; whoever lives publishes no more."""
        for idx, group in enumerate(self.groups):
            for page in list(group.published.values()):
                self._unpublish(idx, page)
            group.idle = []
        for sequence in self.sequences.values():
            sequence.is_publishing = False

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

    def _rest(self, idx: int, page: Page) -> None:
        """Make a page idle that has lost a holder, if it was the last and the page is published."""
        if page.prefix is not None and self.num_holders(page) == 0:
            self.groups[idx].idle.append(page)
            self.clock += 1
            page.idle_since = self.clock

    def _take(self) -> Page:
        """Return a new page, for which the oldest idle one of all groups may have to go."""
        if self.num_available() == sum(len(group.idle) for group in self.groups):
            oldest = [(group.idle[0].idle_since, other) for other, group in enumerate(self.groups) if group.idle]
            _, other = min(oldest)
            self._unpublish(other, self.groups[other].idle.pop(0))
            self.num_evictions += 1
        return Page()

    def _unpublish(self, idx: int, page: Page) -> None:
        assert page.prefix is not None
        del self.groups[idx].published[page.prefix]
        page.prefix = None
