"""Prefix hits of the twin: the longest prefix that all groups have, partial pages, and why a hit ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.memory import HitEnd, Namespace
from tests.memory.media import Row
from tests.memory.twin_pages import Match, Pages, PartialMatch, Prefix

if TYPE_CHECKING:
    from tests.memory.twin import Twin


def match(twin: Twin, namespace: Namespace, tokens: list[int], max_tokens: int | None) -> Match:
    """Return the longest prefix of whole pages that leaves a token to compute, and what goes on inside a page."""
    most = len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)
    if not twin.caching:
        return Match([[] for _ in twin.groups], 0, {HitEnd.LIMIT})
    groups = range(len(twin.groups))
    pages = longest(twin, namespace, tokens, most, groups)
    start = num_tokens = len(pages[0]) * twin.page_size
    last = longest_partial_match(twin, namespace, tokens, start)
    if last and not twin.states:
        num_tokens = min(most, start + last.num_tokens)
    if last and num_tokens > start:
        for idx, page in zip(groups, last.pages, strict=True):
            alive = [twin.is_alive(idx, i, num_tokens) for i in range(len(pages[idx]))]
            pages[idx] = [old if is_alive else None for old, is_alive in zip(pages[idx], alive, strict=True)]
            pages[idx].append(page)
    if num_tokens == most or (twin.states and start + twin.page_size > most):
        return Match(pages, num_tokens, {HitEnd.LAST_TOKEN if most == len(tokens) - 1 else HitEnd.LIMIT})
    if twin.states and len(longest(twin, namespace, tokens, most, twin.kept)[0] if twin.kept else [0] * most) > len(
        pages[0]
    ):
        return Match(pages, num_tokens, {HitEnd.GROUP})
    return Match(pages, num_tokens, _reasons(twin, namespace, tokens, start))


def diverged_at(twin: Twin, namespace: Namespace, tokens: list[int], max_tokens: int | None) -> set[int]:
    """Return where the prompt may be said to part from what is published, or was and is not forgotten."""
    if not twin.caching or (not twin.states and all(group.kind.name == "full" for group in twin.groups)):
        return {0}
    most = (len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)) // twin.page_size
    tiers = (twin.groups, () if twin.host is None else twin.host.groups)
    published = {prefix for groups in tiers for group in groups for prefix in group.published}
    places = {_parting(twin, namespace, tokens, most, published)}
    # Of what is gone, the tree remembers some.
    gone = twin.departed - published
    places |= {_parting(twin, namespace, tokens, most, published | {prefix}) for prefix in gone}
    return places | {_parting(twin, namespace, tokens, most, published | gone)}


def _parting(twin: Twin, namespace: Namespace, tokens: list[int], most: int, known: set[Prefix]) -> int:
    """Return the tokens of the first pages that are known, where something known goes on otherwise; else 0."""
    size = twin.page_size
    words = [theirs for space, theirs in known if space == namespace]

    def num_common(theirs: tuple[int, ...]) -> int:
        return next(
            (i for i in range(most) if theirs[i * size : (i + 1) * size] != tuple(tokens[i * size : (i + 1) * size])),
            most,
        )

    length = max(map(num_common, words), default=0)
    if not 0 < length < most:
        return 0
    ours = tuple(tokens[length * size : (length + 1) * size])
    ways = [theirs[length * size : (length + 1) * size] for theirs in words if num_common(theirs) == length]
    return length * size if any(way and ours[: len(way)] != way for way in ways) else 0


def longest(twin: Twin, namespace: Namespace, tokens: list[int], most: int, members: Sequence[int]) -> list[Pages]:
    """Return the pages of the longest prefix, up to a limit of tokens, whose live pages are all published."""
    for length in range(most // twin.page_size if twin.caching else 0, 0, -1):
        hit = [_hit(twin, namespace, tokens, idx, length) for idx in members]
        if all(pages is not None for pages in hit) and (
            any(page is not None for pages in hit if pages is not None for page in pages)
            or _is_published(twin, namespace, tokens, length)
        ):
            return [pages for pages in hit if pages is not None]
    return [[] for _ in members]


def _is_published(twin: Twin, namespace: Namespace, tokens: list[int], length: int) -> bool:
    """Say whether the last page of a prefix is published, needed or not."""
    tiers = (twin.groups, () if twin.host is None else twin.host.groups)
    prefix = namespace, tuple(tokens[: length * twin.page_size])
    return any(prefix in group.published for groups in tiers for group in groups)


def longest_partial_match(twin: Twin, namespace: Namespace, tokens: list[int], start: int) -> PartialMatch | None:
    """Return the pages, one in each group, that have most of the tokens after the first whole pages."""
    best = None
    if not twin.kept:
        return None
    for known, words in reversed(twin.groups[twin.kept[0]].published):
        if known == namespace and words[:start] == tuple(tokens[:start]) and start < len(words):
            pages = [twin.groups[idx].published.get((known, words)) for idx in twin.kept]
            if len(words) <= start + twin.page_size and all(pages):
                theirs, wanted = words[start:], tokens[start : start + twin.page_size]
                count = next((i for i, (a, b) in enumerate(zip(theirs, wanted, strict=False)) if a != b), None)
                count = min(len(theirs), len(wanted)) if count is None else count
                if any(isinstance(word, Row) for word in (*theirs, *wanted)):
                    # A page with media is wanted as it is, or not at all.
                    count = len(theirs) if theirs == tuple(wanted) else 0
                if best is None or count > best.num_tokens:
                    best = PartialMatch(count, [page for page in pages if page])
    return best


def _reasons(twin: Twin, namespace: Namespace, tokens: list[int], start: int) -> set[HitEnd]:
    """Return the reasons that are true of a hit that ends early; the tree may have forgotten an evicted block."""
    words = tuple(tokens[: start + twin.page_size])
    is_whole = len(words) == start + twin.page_size
    if is_whole and any((namespace, words) in group.published for group in twin.groups):
        return {HitEnd.GROUP}
    is_departed = is_whole and (namespace, words) in twin.departed
    return {HitEnd.NOT_CACHED, HitEnd.EVICTED} if is_departed else {HitEnd.NOT_CACHED}


def _hit(twin: Twin, namespace: Namespace, tokens: list[int], idx: int, length: int) -> Pages | None:
    pages: Pages = []
    alive = twin.alive(idx, length * twin.page_size, length * twin.page_size)
    for i in range(length):
        if i in alive:
            prefix = namespace, tuple(tokens[: (i + 1) * twin.page_size])
            page = twin.groups[idx].published.get(prefix)
            if page is None and twin.host is not None:
                page = twin.host.groups[idx].published.get(prefix)
            if page is None:
                return None
            pages.append(page)
        else:
            pages.append(None)
    return pages
