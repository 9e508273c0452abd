"""The namespaces in which sequences were opened lately."""

from __future__ import annotations

from quire.memory.chain import Root


class Namespaces:
    """The roots of namespaces, the one used last at the end."""

    __slots__ = ("_roots",)

    LIMIT = 16

    def __init__(self) -> None:
        self._roots: dict[Root, None] = {}

    def add(self, root: Root) -> None:
        """Note a root; of too many, the one that was in use longest ago is forgotten."""
        self._roots.pop(root, None)
        self._roots[root] = None
        if len(self._roots) > self.LIMIT:
            del self._roots[next(iter(self._roots))]

    def snapshot(self) -> tuple[bytes, ...]:
        """Return the roots' digests, in order, as a comparable value."""
        return tuple(root.digest for root in self._roots)

    def others(self, root: Root) -> list[Root]:
        """Return all roots but one."""
        return [known for known in self._roots if known != root]
