"""A cache of compiled grammars, which the requests of a model share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final
from weakref import WeakValueDictionary

from quire.sequences.structured import GrammarSource
from quire.text.structured.local_grammars import HeldGrammar

# Limits of the cached grammars that no request uses: their number, and the memory of their compilation.
NUM_CACHED: Final = 32
CACHED_BYTES: Final = 256 << 20


class GrammarCache:
    """The compiled grammars of one model; thread-safe.

    A grammar stays while it is referenced; the most recently used ones stay longer: at most `NUM_CACHED`, and at most
    `CACHED_BYTES` together.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[GrammarSource, HeldGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarSource, HeldGrammar] = OrderedDict()

    def find(self, source: GrammarSource) -> HeldGrammar | None:
        """Return a grammar if it is cached and not lost with its process, else None."""
        with self._lock:
            known = self._known.get(source)
            return None if known is None or not known.is_held else self._touch(source, known)

    def add(self, source: GrammarSource, grammar: HeldGrammar) -> HeldGrammar:
        """Add a newly compiled grammar and return it, or the grammar that another thread has added meanwhile."""
        known = self.find(source)
        if known is not None:
            return known
        with self._lock:
            self._known[source] = grammar
            return self._touch(source, grammar)

    def _touch(self, source: GrammarSource, grammar: HeldGrammar) -> HeldGrammar:
        """Mark a grammar as used most recently, and evict the least recently used ones beyond the limits."""
        recent = self._recent
        recent[source] = grammar
        recent.move_to_end(source)
        while len(recent) > NUM_CACHED or sum(one.num_bytes for one in recent.values()) > CACHED_BYTES:
            recent.popitem(last=False)
        return grammar
