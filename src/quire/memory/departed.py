"""What is remembered of blocks and namespaces that are not at hand, only so that a miss can be explained."""

from __future__ import annotations

from collections.abc import Iterable

from quire.memory.chain import Link


class Departed:
    """Identities that were published and are no more: the latest ones, at most `limit` of them and no fewer than half.

    Two generations instead of a queue: to note one is to add to a set.

    Args:
        limit: digests to remember; 0 remembers none.
    """

    __slots__ = ("_limit", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._young or digest in self._old

    def snapshot(self) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """Return what is remembered as a comparable value."""
        return frozenset(self._young), frozenset(self._old)

    def add(self, digests: Iterable[bytes]) -> None:
        """Note digests; the oldest are forgotten as new ones come."""
        half = self._limit // 2
        for digest in digests:
            if len(self._young) >= half:
                self._young, self._old = set(), self._young
            if half:
                self._young.add(digest)


class Namespaces:
    """The roots of namespaces in which sequences were opened lately."""

    __slots__ = ("_roots",)

    LIMIT = 16

    def __init__(self) -> None:
        self._roots: dict[bytes, Link] = {}

    def add(self, root: Link) -> None:
        """Note a root; of too many, the one that was in use longest ago is forgotten."""
        self._roots.pop(root[0], None)
        self._roots[root[0]] = root
        if len(self._roots) > self.LIMIT:
            del self._roots[next(iter(self._roots))]

    def snapshot(self) -> tuple[bytes, ...]:
        """Return the roots, the one used last at the end, as a comparable value."""
        return tuple(self._roots)

    def others(self, root: Link) -> list[Link]:
        """Return all roots but one."""
        return [known for digest, known in self._roots.items() if digest != root[0]]
