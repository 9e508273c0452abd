"""Pages of the twin, and the tables that hold them."""

from __future__ import annotations

from typing import NamedTuple

from quire.memory import HitEnd, Namespace

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

    __slots__ = ("goes_first", "goes_last", "idle_since", "prefix")

    def __init__(self) -> None:
        self.prefix: Prefix | None = None
        self.idle_since = 0
        self.goes_first = False
        self.goes_last = False

    @property
    def turn(self) -> tuple[bool, bool, int]:
        """When an idle page is evicted: lower is sooner."""
        return not self.goes_first, self.goes_last, self.idle_since


# A dead page, of which nothing is left, is None.
Pages = list[Page | None]


class Match(NamedTuple):
    """What is hit.

    Args:
        pages: of each group.
        num_tokens: of them.
        ends: what may be given as the reason why there are no more.
    """

    pages: list[Pages]
    num_tokens: int
    ends: set[HitEnd]


class PartialMatch(NamedTuple):
    """A page of each group that goes on with some of the tokens wanted.

    Args:
        num_tokens: that are those wanted.
        pages: of each group.
    """

    num_tokens: int
    pages: list[Page]


class TwinGroup:
    """The pages of one cache group that are published, and those of them that nobody holds."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.published: dict[Prefix, Page] = {}
        self.idle: list[Page] = []

    @property
    def by_turn(self) -> list[Page]:
        """The idle pages in the order of their eviction."""
        return sorted(self.idle, key=lambda page: page.turn)


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
        self.snapshot_points: set[int] = set()
        # Pages behind which the next prompt may go on; lengths of snapshots that a later one takes the place of.
        self.branch_points: set[int] = set()
        self.opened_on = 0
        self.regular = 0
        # The length to go back to, and by group the pages that are held for it.
        self.checkpoint: tuple[int, dict[int, Page]] | None = None

    def held(self, idx: int) -> Pages:
        """Return the pages of a group that the sequence holds."""
        spare = self.checkpoint[1] if self.checkpoint else {}
        return [*self.pages[idx], *([spare[idx]] if idx in spare else [])]
