"""The host tier of the slow twin: pages again, found by looking at everything."""

from __future__ import annotations

from typing import Any

from quire.memory import Namespace
from tests.memory.twin import Twin
from tests.memory.twin_pages import Page, Pages, Prefix, TwinGroup


class HostTwin:
    """What the host tier must hold, and what moves between it and the device.

    Args:
        device: the twin of all else.
        num_pages: for all groups together.
    """

    def __init__(self, device: Twin, num_pages: int) -> None:
        self.device = device
        self.num_pages = num_pages
        self.groups = [TwinGroup(group.kind) for group in device.groups]
        # The pages of sequences that are swapped out, which have none on the device.
        self.tables: dict[int, list[Pages]] = {}
        self.num_swap_outs = 0
        self.num_swap_ins = 0
        self.num_demotions = 0
        self.num_promotions = 0
        self.num_evictions = 0

    # ---- questions ----

    def held(self) -> list[Page]:
        """Return the pages of all swapped sequences, each once."""
        return list(
            {id(page): page for table in self.tables.values() for pages in table for page in pages if page}.values()
        )

    def num_available(self) -> int:
        """Count the pages that could be handed out."""
        return self.num_pages - len(self.held())

    def find(self, idx: int, page: Page, groups: list[TwinGroup]) -> Page | None:
        """Return the page of a tier that is published as a page of the other is."""
        return None if page.prefix is None else groups[idx].published.get(page.prefix)

    def out_margin(self, seq_ids: list[int]) -> tuple[int, int]:
        """Return the pages that a family has, and those that the host would have left, were it swapped out."""
        tables = [self.device.sequences[seq_id].pages for seq_id in seq_ids]
        return self._margin(tables, self.groups, self.num_available())

    def in_margin(self, seq_ids: list[int]) -> tuple[int, int]:
        """Return the pages that a family has, and those that the device would have left, were it swapped in."""
        tables = [self.tables[seq_id] for seq_id in seq_ids]
        return self._margin(tables, self.device.groups, self.device.num_available())

    def _margin(self, tables: list[list[Pages]], groups: list[TwinGroup], available: int) -> tuple[int, int]:
        pages = {id(page): (idx, page) for table in tables for idx, pages in enumerate(table) for page in pages if page}
        for idx, page in pages.values():
            equal = self.find(idx, page, groups)
            available -= equal is None or equal in groups[idx].idle
        return len(pages), available

    def growth(self, seq_ids: list[int], goals: list[int]) -> int:
        """Return the pages that full groups take when a family comes back and grows."""
        size, num_pages = self.device.page_size, 0
        for idx in range(len(self.groups)):
            growers: list[Page] = []
            for seq_id, goal in zip(seq_ids, goals, strict=True):
                sequence, pages = self.device.sequences[seq_id], self.tables[seq_id][idx]
                if goal > sequence.num_slots:
                    num_pages += self.device.num_pages_of(goal) - len(pages)
                    if sequence.num_slots % size and pages[-1] is not None:
                        growers.append(pages[-1])
            for page in {id(page): page for page in growers}.values():
                holders = sum(held is page for seq_id in seq_ids for held in self.tables[seq_id][idx])
                equal = self.find(idx, page, self.device.groups)
                holders += 0 if equal is None else self.device.num_holders(equal)
                num_growers = sum(grower is page for grower in growers)
                num_pages += num_growers - (num_growers == holders)
        return num_pages

    # ---- commands ----

    def keep(self, idx: int, prefix: Prefix) -> None:
        """Take in a page that is evicted from the device, if there is room; what is there already is young again."""
        group = self.groups[idx]
        if len(prefix[1]) % self.device.page_size:
            return  # a tail
        if prefix in group.published:
            page = group.published[prefix]
            if page in group.idle:
                group.idle.remove(page)
                self._rest(idx, page)
        elif self.num_available():
            page = self._take()
            self._publish(idx, page, prefix)
            self._rest(idx, page)
            self.num_demotions += 1

    def swap_out(self, seq_ids: list[int]) -> None:
        """Move a family to the host."""
        device = self.device
        sequences = [device.sequences[seq_id] for seq_id in seq_ids]
        found = self._find_all([sequence.pages for sequence in sequences], self.groups)
        tables: list[list[Pages]] = [[[None] * len(pages) for pages in sequence.pages] for sequence in sequences]
        # Held from the start, so that they count as such.
        self.tables.update(zip(seq_ids, tables, strict=True))
        for table, sequence in zip(tables, sequences, strict=True):
            for idx, pages in enumerate(sequence.pages):
                table[idx][:] = [found.get(page) for page in pages]
        for idx in range(len(self.groups)):
            for table, sequence in zip(tables, sequences, strict=True):
                for i, page in enumerate(sequence.pages[idx]):
                    if page is None or table[idx][i] is not None:
                        continue
                    if page not in found:
                        found[page] = self._take()
                        self.num_swap_outs += 1
                        if page.prefix is not None:
                            self._publish(idx, found[page], page.prefix)
                    table[idx][i] = found[page]
        for sequence in sequences:
            device.release(sequence)
            device._drop_checkpoint(sequence)

    def swap_in(self, seq_ids: list[int]) -> None:
        """Move a family back to the device."""
        device = self.device
        sequences = [device.sequences[seq_id] for seq_id in seq_ids]
        found = self._find_all([self.tables[seq_id] for seq_id in seq_ids], device.groups)
        for seq_id, sequence in zip(seq_ids, sequences, strict=True):
            sequence.pages = [[found.get(page) for page in pages] for pages in self.tables[seq_id]]
        for idx in range(len(self.groups)):
            for seq_id, sequence in zip(seq_ids, sequences, strict=True):
                for i, page in enumerate(self.tables[seq_id][idx]):
                    if page is None or sequence.pages[idx][i] is not None:
                        continue
                    if page not in found:
                        found[page] = device._take()
                        self.num_swap_ins += 1
                        if page.prefix is not None:
                            found[page].prefix = page.prefix
                            device.groups[idx].published[page.prefix] = found[page]
                    sequence.pages[idx][i] = found[page]
        for seq_id in seq_ids:
            self.leave(seq_id, goes_first=True)

    def load_hit(self, seq_id: int, hit: list[Pages]) -> None:
        """Copy the pages of a hit that are here to the device."""
        device, mine = self.device, self.device.sequences[seq_id].pages
        self.tables[seq_id] = [
            [page if device.is_on_host(idx, page) else None for page in pages] for idx, pages in enumerate(hit)
        ]
        for group, pages in zip(self.groups, self.tables[seq_id], strict=True):
            group.idle = [page for page in group.idle if page not in pages]
        for idx, pages in enumerate(self.tables[seq_id]):
            for i, page in enumerate(pages):
                if page is not None and page.prefix is not None:
                    mine[idx][i] = new = device._take()
                    new.prefix = page.prefix
                    device.groups[idx].published[page.prefix] = new
                    self.num_promotions += 1
        self.leave(seq_id, goes_first=True)

    def find_loads(
        self,
        namespace: Namespace,
        tokens: list[int],
        max_tokens: int | None,
        stored: set[tuple[int, Namespace, tuple[int, ...]]],
    ) -> list[tuple[int, int]]:
        """Return places and groups of what must be loaded for the longest prefix for which there is room."""
        device, size = self.device, self.device.page_size
        limit = (len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)) // size
        while limit:
            missing: list[Any] = []
            length, num_resting = limit, 0
            for length in range(limit, 0, -1):
                needed = [
                    (i, idx)
                    for i in range(length)
                    for idx in range(len(self.groups))
                    if i in device.alive(idx, length * size, length * size)
                ]
                missing, num_resting = [], 0
                for i, idx in needed:
                    prefix = namespace, tuple(tokens[: (i + 1) * size])
                    if prefix not in device.groups[idx].published:
                        if prefix not in self.groups[idx].published:
                            missing.append((i, idx))
                        num_resting += self.groups[idx].published.get(prefix) in self.groups[idx].idle
                if all((idx, namespace, tuple(tokens[: (i + 1) * size])) in stored for i, idx in missing):
                    break
            else:
                return []
            if len(missing) + num_resting <= self.num_available():
                return missing
            limit = length * 3 // 4
        return []

    def find_missing(self, namespace: Namespace, tokens: list[int], max_tokens: int | None) -> list[tuple[int, int]]:
        """Return places and groups of the whole pages that no tier has."""
        size = self.device.page_size
        limit = (len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)) // size
        return [
            (i, idx)
            for i in range(limit)
            for idx in range(len(self.groups))
            if not any(
                (namespace, tuple(tokens[: (i + 1) * size])) in groups[idx].published
                for groups in (self.device.groups, self.groups)
            )
        ]

    def publish_loaded(self, namespace: Namespace, tokens: list[int], end: int, loads: list[tuple[int, int]]) -> None:
        """Take in what was loaded; what a hit needs besides makes no room for it."""
        size, device = self.device.page_size, self.device
        held: list[tuple[int, int, Page]] = []
        self.tables[0] = [[] for _ in self.groups]
        for idx, group in enumerate(self.groups):
            for i in range(end):
                prefix = namespace, tuple(tokens[: (i + 1) * size])
                page = group.published.get(prefix)
                is_alive = i in device.alive(idx, end * size, end * size)
                is_needed = is_alive and prefix not in device.groups[idx].published
                if page is not None and page in group.idle and is_needed:
                    group.idle.remove(page)
                    held.append((i, idx, page))
                    self.tables[0][idx].append(page)
        for i, idx in loads:
            page = self._take()
            self._publish(idx, page, (namespace, tuple(tokens[: (i + 1) * size])))
            held.append((i, idx, page))
            self.tables[0][idx].append(page)
        for _, idx, page in sorted(held, key=lambda item: item[:2], reverse=True):
            self.tables[0][idx].remove(page)
            self._rest(idx, page)
        del self.tables[0]

    def leave(self, seq_id: int, *, goes_first: bool = False) -> None:
        """Release what a sequence has here, the tail of all groups first; what the device has too is evicted first."""
        tables = self.tables[seq_id]
        for i in reversed(range(max(map(len, tables)))):
            for idx, pages in enumerate(tables):
                page = pages.pop() if i < len(pages) else None
                if page is not None:
                    self._rest(idx, page, goes_first=goes_first)
        del self.tables[seq_id]

    def reset(self) -> None:
        """Forget what is published."""
        for group in self.groups:
            for page in group.published.values():
                page.prefix = None
            group.published, group.idle = {}, []

    # ---- steps of commands ----

    def _find_all(self, tables: list[list[Pages]], groups: list[TwinGroup]) -> dict[Page | None, Page]:
        """Return the equals of pages in the other tier; those that are idle there are so no more."""
        found: dict[Page | None, Page] = {}
        for table in tables:
            for idx, pages in enumerate(table):
                for page in pages:
                    equal = None if page is None else self.find(idx, page, groups)
                    if equal is not None:
                        found[page] = equal
                        if equal in groups[idx].idle:
                            groups[idx].idle.remove(equal)
        return found

    def _publish(self, idx: int, page: Page, prefix: Prefix) -> None:
        page.prefix = prefix
        self.groups[idx].published[prefix] = page

    def _rest(self, idx: int, page: Page, *, goes_first: bool = False) -> None:
        if page.prefix is not None and page not in self.held():
            self.groups[idx].idle.append(page)
            self.device.clock += 1
            page.idle_since = self.device.clock
            page.goes_first = goes_first

    def _take(self) -> Page:
        """Return a new page, for which the oldest idle one of all groups may have to go."""
        if self.num_available() == sum(len(group.idle) for group in self.groups):
            _, idx = min((page.turn, idx) for idx, group in enumerate(self.groups) for page in group.idle)
            victim = self.groups[idx].by_turn[0]
            self.groups[idx].idle.remove(victim)
            assert victim.prefix is not None
            del self.groups[idx].published[victim.prefix]
            victim.prefix = None
            self.num_evictions += 1
        return Page()
