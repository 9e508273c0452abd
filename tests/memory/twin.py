"""A slow twin of the memory manager, made of plain token lists: no block ids, no tables, no digests.

A page is an object; who holds it is found by looking at every sequence. A page is published under the whole prefix
that it ends. The twin says exactly what the manager must answer: hit lengths, verdicts, refusals, counts, the order of
eviction, and which sequences share which pages.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from quire.memory import Namespace

if TYPE_CHECKING:
    from tests.memory.host_twin import HostTwin

Prefix = tuple[Namespace, tuple[int, ...]]


class Kind(NamedTuple):
    """What the queries of a cache group read.

    Args:
        name: "full", "window" or "chunk".
        extent: tokens of the window or of a chunk.
    """

    name: str = "full"
    extent: int = 0

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


class Twin:
    """What a KV cache manager must do whose groups share pages of one size, found out the slow way.

    Args:
        num_pages: for each group, shared by all.
    """

    def __init__(
        self, num_pages: int, page_size: int, kinds: tuple[Kind, ...], *, watermark: int, caching: bool
    ) -> None:
        self.num_pages = num_pages * len(kinds)
        self.page_size = page_size
        self.watermark = watermark
        self.caching = caching
        self.groups = [TwinGroup(kind) for kind in kinds]
        self.sequences: dict[int, TwinSequence] = {}
        self.clock = 0
        self.num_copies = 0
        self.num_merges = 0
        self.num_evictions = 0
        self.host: HostTwin | None = None

    # ---- questions ----

    def num_holders(self, page: Page) -> int:
        """Count the places that name a page."""
        return sum(held is page for sequence in self.sequences.values() for pages in sequence.pages for held in pages)

    def num_used(self, idx: int) -> int:
        """Count the pages of a group that some sequence holds."""
        return len({id(page) for sequence in self.sequences.values() for page in sequence.pages[idx] if page})

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

    def match(self, namespace: Namespace, tokens: list[int], max_tokens: int | None) -> list[Pages]:
        """Return the pages of the longest prefix that leaves a token to compute and whose live pages are published."""
        most = (len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)) // self.page_size
        for length in range(most if self.caching else 0, 0, -1):
            hit = [self._hit(namespace, tokens, idx, length) for idx in range(len(self.groups))]
            if all(page_idx is not None for page_idx in hit):
                return [pages for pages in hit if pages is not None]
        return [[] for _ in self.groups]

    def is_on_host(self, idx: int, page: Page | None) -> bool:
        """Tell whether a page that was found is one of the host's."""
        return self.host is not None and page in self.host.groups[idx].published.values()

    def _hit(self, namespace: Namespace, tokens: list[int], idx: int, length: int) -> Pages | None:
        pages: Pages = []
        for i in range(length):
            if self.is_alive(idx, i, length * self.page_size):
                prefix = namespace, tuple(tokens[: (i + 1) * self.page_size])
                page = self.groups[idx].published.get(prefix)
                if page is None and self.host is not None:
                    page = self.host.groups[idx].published.get(prefix)
                if page is None:
                    return None
                pages.append(page)
            else:
                pages.append(None)
        return pages

    def peak(self, idx: int, num_tokens: int, step: int) -> int:
        """Return the most pages of a group that a sequence holds at once, trying every way to cut it into steps."""
        return max(
            sum(self.is_alive(idx, i, done) for i in range(self.num_pages_of(done + count)))
            for done, count in product(range(num_tokens), range(1, step + 1))
            if done + count <= num_tokens
        )

    def joint_peak(self, num_tokens: int) -> int:
        """Return the most pages of all groups that a sequence holds at once when it grows token by token."""
        return max(
            sum(
                self.is_alive(idx, i, done)
                for idx in range(len(self.groups))
                for i in range(self.num_pages_of(done + 1))
            )
            for done in range(num_tokens)
        )

    def least_needed(self, idx: int, num_tokens: int, hit: Pages, step: int) -> int:
        """Return the pages that a sequence needs beyond the idle ones of its hit, at the worst moment."""
        start = len(hit) * self.page_size
        idle = self.groups[idx].idle
        num_idle = sum(page in idle for page in hit)
        most = 0
        for done, count in product(range(start, num_tokens), range(1, step + 1)):
            if done + count <= num_tokens:
                alive = [i for i in range(self.num_pages_of(done + count)) if self.is_alive(idx, i, done)]
                most = max(most, sum(i >= len(hit) or hit[i] in idle or self.is_on_host(idx, hit[i]) for i in alive))
        return most - num_idle

    # ---- commands ----

    def open(self, seq_id: int, namespace: Namespace, tokens: list[int], hit: list[Pages]) -> None:
        """Open a sequence on a hit."""
        for group, pages in zip(self.groups, hit, strict=True):
            group.idle = [page for page in group.idle if page not in pages]
        num_slots = len(hit[0]) * self.page_size
        mine = [[None if self.is_on_host(idx, page) else page for page in pages] for idx, pages in enumerate(hit)]
        self.sequences[seq_id] = TwinSequence(namespace, tokens, mine, num_slots)
        if self.host is not None:
            self.host.promote(seq_id, hit)

    def append(self, seq_id: int, num_tokens: int) -> bool:
        """Give slots, or change nothing and return False."""
        sequence = self.sequences[seq_id]
        is_tail_written = sequence.num_slots % self.page_size > 0
        fresh = self.num_pages_of(sequence.num_slots + num_tokens) - len(sequence.pages[0])
        is_copied = [is_tail_written and self.num_holders(pages[-1]) > 1 for pages in sequence.pages]  # type: ignore[arg-type]
        if fresh * len(self.groups) + sum(is_copied) > self.num_available():
            return False
        sequence.num_slots += num_tokens
        for idx, pages in enumerate(sequence.pages):
            if is_tail_written and not is_copied[idx] and pages[-1] is not None and pages[-1].prefix is not None:
                self._unpublish(idx, pages[-1])
        for idx, pages in enumerate(sequence.pages):
            if is_copied[idx]:
                old, pages[-1] = pages[-1], self._take()
                assert old is not None
                self._rest(idx, old)
                self.num_copies += 1
        for pages in sequence.pages:
            for _ in range(fresh):
                pages.append(self._take())
        return True

    def store(self, seq_id: int, num_computed: int) -> None:
        """Note that tokens are stored; full pages are published, or replaced by those that are; dead ones go."""
        sequence = self.sequences[seq_id]
        sequence.num_computed = num_computed
        for i in range(num_computed // self.page_size if self.caching and sequence.is_publishing else 0):
            prefix = (sequence.namespace, tuple(sequence.tokens[: (i + 1) * self.page_size]))
            for group, pages in zip(self.groups, sequence.pages, strict=True):
                page, known = pages[i], group.published.get(prefix)
                if page is None:
                    continue
                if known is None:
                    page.prefix = prefix
                    group.published[prefix] = page
                elif known is not page:
                    if known in group.idle:
                        group.idle.remove(known)
                    pages[i] = known
                    self.num_merges += 1
        for idx, pages in enumerate(sequence.pages):
            for i, page in enumerate(pages):
                if page is not None and not self.is_alive(idx, i, num_computed):
                    pages[i] = None
                    self._rest(idx, page)

    def fork(self, parent_id: int, child_id: int, tokens: list[int]) -> None:
        """Open a child on all of its parent's pages."""
        parent = self.sequences[parent_id]
        pages = [list(pages) for pages in parent.pages]
        self.sequences[child_id] = TwinSequence(parent.namespace, tokens, pages, parent.num_slots)
        self.sequences[child_id].is_publishing = parent.is_publishing

    def can_truncate(self, seq_id: int, num_tokens: int) -> bool:
        """Tell whether all that the next query would read is still there."""
        sequence = self.sequences[seq_id]
        return all(
            page is not None or not self.is_alive(idx, i, min(num_tokens, sequence.num_computed))
            for idx, pages in enumerate(sequence.pages)
            for i, page in enumerate(pages)
        )

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Take slots back."""
        sequence = self.sequences[seq_id]
        sequence.num_slots = num_tokens
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        self._give_back(sequence, self.num_pages_of(num_tokens))

    def free(self, seq_id: int) -> None:
        """Release a sequence, its tail first."""
        self._give_back(self.sequences[seq_id], 0)
        del self.sequences[seq_id]
        if self.host is not None and seq_id in self.host.tables:
            self.host.leave(seq_id)

    def reset(self) -> None:
        """Forget what is published; whoever lives publishes no more."""
        for idx, group in enumerate(self.groups):
            for page in list(group.published.values()):
                self._unpublish(idx, page)
            group.idle = []
        for sequence in self.sequences.values():
            sequence.is_publishing = False
        if self.host is not None:
            self.host.reset()

    # ---- steps of commands ----

    def _give_back(self, sequence: TwinSequence, keep: int) -> None:
        for idx, pages in enumerate(sequence.pages):
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
            victim = self.groups[other].idle.pop(0)
            if self.host is not None and victim.prefix is not None:
                self.host.keep(other, victim.prefix)
            self._unpublish(other, victim)
            self.num_evictions += 1
        return Page()

    def _unpublish(self, idx: int, page: Page) -> None:
        assert page.prefix is not None
        del self.groups[idx].published[page.prefix]
        page.prefix = None
