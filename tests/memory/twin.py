"""A slow twin of the memory manager, made of plain token lists: no block ids, no tables, no digests.

A page is an object; who holds it is found by looking at every sequence. A page is published under the whole prefix
that it ends. The twin says exactly what the manager must answer: hit lengths, verdicts, refusals, counts, the order of
eviction, and which sequences share which pages.
"""

from __future__ import annotations

from quire.memory import Namespace, Verdict

Prefix = tuple[Namespace, tuple[int, ...]]


class Page:
    """Room for one block's worth of tokens; equal only to itself."""

    __slots__ = ("prefix",)

    def __init__(self) -> None:
        self.prefix: Prefix | None = None


class TwinSequence:
    """A sequence as its owner sees it, and its pages."""

    def __init__(self, namespace: Namespace, tokens: list[int], pages: list[Page], num_slots: int) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.pages = pages
        self.num_slots = num_slots
        self.num_computed = num_slots


class Twin:
    """What a KV cache manager of one cache group must do, found out the slow way."""

    def __init__(self, num_pages: int, page_size: int, *, watermark: int, caching: bool) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.watermark = watermark
        self.caching = caching
        self.sequences: dict[int, TwinSequence] = {}
        self.published: dict[Prefix, Page] = {}
        self.idle: list[Page] = []
        self.num_copies = 0
        self.num_merges = 0
        self.num_evictions = 0

    # ---- questions ----

    def num_holders(self, page: Page) -> int:
        """Count the places that name a page."""
        return sum(held is page for sequence in self.sequences.values() for held in sequence.pages)

    def num_used(self) -> int:
        """Count the pages that some sequence holds."""
        return len({id(page) for sequence in self.sequences.values() for page in sequence.pages})

    def num_available(self) -> int:
        """Count the pages that could be handed out."""
        return self.num_pages - self.num_used()

    def num_pages_of(self, num_tokens: int) -> int:
        """Count the pages that hold so many tokens."""
        return (num_tokens + self.page_size - 1) // self.page_size

    def match(self, namespace: Namespace, tokens: list[int], max_tokens: int | None) -> list[Page]:
        """Return the pages of the longest published prefix that leaves a token to compute."""
        pages: list[Page] = []
        end = self.page_size
        while self.caching and end < len(tokens) and (max_tokens is None or end <= max_tokens):
            page = self.published.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
            end += self.page_size
        return pages

    def verdict(self, num_tokens: int, hit: list[Page], reserved: int) -> tuple[Verdict, int, int]:
        """Return verdict, pages needed and pages available for a new sequence."""
        total = self.num_pages_of(num_tokens)
        if total > self.num_pages:
            return Verdict.NEVER, total, self.num_pages
        spare = self.watermark + reserved if self.sequences else 0
        needed = total - len(hit) + spare
        available = self.num_available() - sum(page in self.idle for page in hit)
        return (Verdict.OK if needed <= available else Verdict.LATER), needed, available

    # ---- commands ----

    def open(self, seq_id: int, namespace: Namespace, tokens: list[int], hit: list[Page]) -> None:
        """Open a sequence on a hit."""
        self.idle = [page for page in self.idle if page not in hit]
        self.sequences[seq_id] = TwinSequence(namespace, tokens, list(hit), len(hit) * self.page_size)

    def append(self, seq_id: int, num_tokens: int) -> bool:
        """Give slots, or change nothing and return False."""
        sequence = self.sequences[seq_id]
        fresh = self.num_pages_of(sequence.num_slots + num_tokens) - len(sequence.pages)
        is_tail_written = sequence.num_slots % self.page_size > 0
        is_copied = is_tail_written and self.num_holders(sequence.pages[-1]) > 1
        if fresh + is_copied > self.num_available():
            return False
        sequence.num_slots += num_tokens
        if is_copied:
            sequence.pages[-1] = self._take()
            self.num_copies += 1
        elif is_tail_written and sequence.pages[-1].prefix is not None:
            self._withdraw(sequence.pages[-1])
        for _ in range(fresh):
            sequence.pages.append(self._take())
        return True

    def store(self, seq_id: int, num_computed: int) -> None:
        """Note that tokens are stored; full pages are published, or replaced by those that are."""
        sequence = self.sequences[seq_id]
        sequence.num_computed = num_computed
        for i in range(num_computed // self.page_size if self.caching else 0):
            prefix = (sequence.namespace, tuple(sequence.tokens[: (i + 1) * self.page_size]))
            page, known = sequence.pages[i], self.published.get(prefix)
            if known is None:
                page.prefix = prefix
                self.published[prefix] = page
            elif known is not page:
                if known in self.idle:
                    self.idle.remove(known)
                sequence.pages[i] = known
                self.num_merges += 1

    def fork(self, parent_id: int, child_id: int, tokens: list[int]) -> None:
        """Open a child on all of its parent's pages."""
        parent = self.sequences[parent_id]
        self.sequences[child_id] = TwinSequence(parent.namespace, tokens, list(parent.pages), parent.num_slots)

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Take slots back."""
        sequence = self.sequences[seq_id]
        sequence.num_slots = num_tokens
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        keep = self.num_pages_of(num_tokens)
        self._give_back(sequence, keep)

    def free(self, seq_id: int) -> None:
        """Release a sequence, its tail first."""
        self._give_back(self.sequences[seq_id], 0)
        del self.sequences[seq_id]

    # ---- steps of commands ----

    def _give_back(self, sequence: TwinSequence, keep: int) -> None:
        while len(sequence.pages) > keep:
            page = sequence.pages.pop()
            if page.prefix is not None and self.num_holders(page) == 0:
                self.idle.append(page)

    def _take(self) -> Page:
        if self.num_used() + len(self.idle) == self.num_pages:
            self._unpublish(self.idle.pop(0))
            self.num_evictions += 1
        return Page()

    def _withdraw(self, page: Page) -> None:
        """Unpublish a page and all that continue it; nobody holds those."""
        assert page.prefix is not None
        namespace, tokens = page.prefix
        for (other, longer), orphan in list(self.published.items()):
            if other == namespace and longer[: len(tokens)] == tokens:
                self._unpublish(orphan)
                if orphan is not page:
                    self.idle.remove(orphan)

    def _unpublish(self, page: Page) -> None:
        assert page.prefix is not None
        del self.published[page.prefix]
        page.prefix = None
