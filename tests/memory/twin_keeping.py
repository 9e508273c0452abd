"""The pages that the twin keeps when a sequence ends, and their order of eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.memory.media import Row
from tests.memory.twin_hits import longest_partial_match
from tests.memory.twin_pages import Pages, TwinSequence

if TYPE_CHECKING:
    from tests.memory.twin import Twin

# Says of a group and a page whether the manager evicts it first, where either may be right.
GoesFirst = Callable[[int, int], bool]


def is_read_at_a_parting(
    twin: Twin, sequence: TwinSequence, idx: int, i: int, last: int, goes_first: GoesFirst
) -> bool:
    """Tell whether a page is read where the sequence's prompt and others part, behind at most `last` pages."""

    def is_read(num_pages: int) -> bool:
        return i < num_pages and twin.is_alive(idx, i, num_pages * twin.page_size)

    if any(map(is_read, sequence.branch_points)):
        return True
    maybe = [is_parting(twin, sequence, place) for place in range(i + 1, last + 1) if is_read(place)]
    return True in maybe or (None in maybe and not goes_first(idx, i))


def is_parting(twin: Twin, sequence: TwinSequence, num_pages: int) -> bool | None:
    """Tell whether something goes on otherwise behind a sequence's first pages; None if that may be forgotten."""
    size = twin.page_size
    start, end = num_pages * size, (num_pages + 1) * size
    tiers = (twin.groups, () if twin.host is None else twin.host.groups)
    published = {prefix for groups in tiers for group in groups for prefix in group.published}
    for known, answer in ((published, True), (twin.departed, None)):
        for namespace, words in known:
            is_here = namespace == sequence.namespace and words[:start] == tuple(sequence.tokens[:start])
            if is_here and len(words) >= end and words[start:end] != tuple(sequence.tokens[start:end]):
                return answer
    return False


def supersede(twin: Twin, sequence: TwinSequence, goes_first: GoesFirst) -> None:
    """Have earlier snapshots evicted first, but those where prompts part."""
    newest = sequence.num_computed
    older, sequence.regular = [sequence.regular], newest
    if newest in sequence.snapshot_points:
        older, sequence.regular, sequence.opened_on = [*older, sequence.opened_on], 0, 0
    for num_tokens in older:
        num_pages = num_tokens // twin.page_size
        if 0 < num_tokens < newest and num_pages not in sequence.branch_points:
            parts_there = is_parting(twin, sequence, num_pages)
            for idx in twin.states:
                if parts_there or (parts_there is None and not goes_first(idx, num_pages - 1)):
                    continue
                page = twin.groups[idx].published.get((sequence.namespace, tuple(sequence.tokens[:num_tokens])))
                if page in twin.groups[idx].idle:
                    twin.rest_anew(idx, page, goes_first=True)


def keep_for_next_turn(twin: Twin, sequence: TwinSequence) -> None:
    """Have dead pages that a hit of whole pages would read evicted like others."""
    end = max(0, sequence.num_computed - 1) // twin.page_size * twin.page_size
    for idx in twin.kept:
        for i in range(end // twin.page_size):
            if twin.is_alive(idx, i, end) and not twin.is_alive(idx, i, sequence.num_computed):
                prefix = sequence.namespace, tuple(sequence.tokens[: (i + 1) * twin.page_size])
                page = twin.groups[idx].published.get(prefix)
                if page in twin.groups[idx].idle and page.goes_first:
                    twin.rest_anew(idx, page)


def evict_last(twin: Twin, tables: list[Pages]) -> None:
    """Give a sequence's published pages the hint, from its tail on; the oldest hints go where they are too many."""
    for i in reversed(range(len(tables[0]))):
        for idx, pages in enumerate(tables):
            page = pages[i]
            if page is None or page.prefix is None:
                continue
            twin.hints = [hint for hint in twin.hints if hint[1] is not page] + [(idx, page)]
            page.goes_last = True
            if len(twin.hints) > twin.retention_limit:
                other, oldest = twin.hints.pop(0)
                oldest.goes_last = False
                if oldest in twin.groups[other].idle:
                    twin.rest_anew(other, oldest)


def publish_tail(twin: Twin, sequence: TwinSequence) -> None:
    """Publish the partly filled last page of a sequence that ends, if that is of any use."""
    page_idx, num_tokens = divmod(sequence.num_computed, twin.page_size)
    if not (num_tokens and twin.caching and sequence.is_publishing) or twin.states:
        return
    tails = [pages[page_idx] for pages in sequence.pages]
    if any(page is None or page.prefix is not None or twin.num_holders(page) > 1 for page in tails):
        return
    tokens = sequence.tokens[: sequence.num_computed]
    if any(isinstance(word, Row) for word in tokens[page_idx * twin.page_size :]):
        return
    known = longest_partial_match(twin, sequence.namespace, tokens, page_idx * twin.page_size)
    prefix = (sequence.namespace, tuple(tokens))
    if (known and known.num_tokens == num_tokens) or any(prefix in group.published for group in twin.groups):
        return
    for group, page in zip(twin.groups, tails, strict=True):
        assert page is not None
        page.prefix = prefix
        group.published[prefix] = page
