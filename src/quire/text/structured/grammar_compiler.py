"""The grammars of requests: compiled on trial in a sandbox, then in the process that uses them, and cached."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from quire.platform.bounded.process import ProcessPool
from quire.platform.threads import WorkerThreads
from quire.sequences.structured import GrammarSource, StructuredOutputs
from quire.text.structured.compile_sandbox import CompileSandbox
from quire.text.structured.compiled_grammar import check_installed, refusal
from quire.text.structured.grammar_backend import GrammarBackend
from quire.text.structured.local_grammars import HeldGrammar

# More than one, so that a slow grammar does not delay all others. Each process holds the vocabulary.
MAX_SANDBOXES = 2
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
            cached = self._known.get(source)
            return None if cached is None or not cached.is_held else self._touch(source, cached)

    def add(self, source: GrammarSource, grammar: HeldGrammar) -> HeldGrammar:
        """Add a newly compiled grammar and return it, or the grammar that another thread has added meanwhile."""
        cached = self.find(source)
        if cached is not None:
            return cached
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


class GrammarCompiler:
    """Opens grammars; thread-safe.

    Args:
        grammars: the model's grammars; closed with the compiler.
        timeout_s: maximum time of the trial of one grammar.
        memory_bytes: maximum memory of a sandbox.

    Attributes:
        grammars: the argument of this name.
        sandboxes: processes in which grammars are compiled on trial.
    """

    def __init__(self, grammars: GrammarBackend, *, timeout_s: float, memory_bytes: int) -> None:
        self.grammars = grammars
        self._cache = GrammarCache()
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self.sandboxes = ProcessPool(self._start_sandbox, MAX_SANDBOXES)
        self._threads = WorkerThreads(MAX_SANDBOXES, "quire-grammars")

    def find(self, wanted: StructuredOutputs) -> HeldGrammar | None:
        """Return a grammar if it is cached."""
        return self._cache.find(wanted.source)

    def open(self, wanted: StructuredOutputs) -> HeldGrammar:
        """Return a grammar; an unknown one is compiled on trial first, which may take `timeout_s` and longer.

        The grammar stays compiled as long as the caller holds it.

        Raises:
            InvalidParameter: it does not compile, or not within the limits; names the field of `wanted`.
            UnsupportedFeature: the package `llguidance` is missing, or cannot read the tokenizer.
            WorkerError: a process does not start, or has ended.
        """
        cached = self.find(wanted)
        if cached is not None:
            return cached
        check_installed()
        source = wanted.source
        self.grammars.start()  # starts at the same time as a sandbox, since both read the tokenizer
        error, num_bytes = self._check(wanted)
        if error is None:
            try:
                return self._cache.add(source, self.grammars.hold(source, num_bytes))
            except ValueError as failure:
                error = str(failure)
        raise refusal(wanted, error)

    async def wait_for(self, wanted: StructuredOutputs) -> HeldGrammar:
        """Await the result of `open` in another thread.

        Raises:
            WorkerError: the engine was shut down.
        """
        cached = self.find(wanted)
        return cached if cached is not None else await self._threads.run(partial(self.open, wanted))

    def close(self) -> None:
        """End all processes."""
        self._threads.close()
        self.sandboxes.close()
        self.grammars.close()

    def _start_sandbox(self) -> CompileSandbox:
        return CompileSandbox(self.grammars.model.setup(), self._memory_bytes)

    def _check(self, wanted: StructuredOutputs) -> tuple[str | None, int]:
        """Return the reason why a grammar does not compile, or None, and the bytes of memory that it takes."""
        with self.sandboxes.process() as sandbox:
            return sandbox.compile(wanted.source, self._timeout_s), sandbox.num_bytes
