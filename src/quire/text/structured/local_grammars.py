"""The grammars of a model with a small vocabulary, in the engine's own process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from quire.sequences.structured import GrammarSource
from quire.text.structured.compiled_grammar import Grammar
from quire.text.structured.grammar_setup import CompiledGrammars, GrammarModel
from quire.text.structured.state_table import Appended, Masks, StateTable, StepStart


class HeldGrammar:
    """A compiled grammar, which stays compiled while this object exists.

    Args:
        holder: the grammar, or the pipes of its process.
        num_bytes: memory that the grammar takes.
    """

    __slots__ = ("__weakref__", "_holder", "num_bytes")

    def __init__(self, holder: object, num_bytes: int) -> None:
        self._holder = holder
        self.num_bytes = num_bytes

    @property
    def is_held(self) -> bool:
        """False if the grammar was lost with its process."""
        return True


class LocalGrammars:
    """Grammars in this process; see `quire.text.structured.grammar_backend.GrammarBackend`."""

    def __init__(self, model: GrammarModel) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._compiled: CompiledGrammars | None = None

    def start(self) -> None:
        """Do nothing: `hold` opens the tokenizer."""

    def hold(self, source: GrammarSource, num_bytes: int) -> HeldGrammar:
        """Compile a grammar, which stays compiled while the returned object exists."""
        return HeldGrammar(self._find(source), num_bytes)

    def mask_source(self, *, overlaps: bool) -> LocalMasks:
        """Return a source of masks."""
        return LocalMasks(StateTable(self._find, self.model.vocab_size, self.model.end_token_ids), overlaps=overlaps)

    def close(self) -> None:
        """Do nothing."""

    def _find(self, source: GrammarSource) -> Grammar:
        with self._lock:
            if self._compiled is None:
                self._compiled = CompiledGrammars(self.model.setup())
        return self._compiled.find(source)


class LocalMasks:
    """A source of masks in this process; see `quire.text.structured.grammar_backend.MaskSource`.

    Several threads would gain nothing: matchers of one grammar wait for the lock of its lexer.
    """

    def __init__(self, table: StateTable, *, overlaps: bool = False) -> None:
        self._table = table
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-masks") if overlaps else None
        self._filled: Future[Masks] | Masks | None = None

    def begin(self, step: StepStart) -> None:
        """Fill the masks of a step, or start to fill them."""
        fill = self._table.begin
        self._filled = fill(step) if self._thread is None else self._thread.submit(fill, step)

    def masks(self) -> Masks:
        """Wait for the masks of the last step that was begun."""
        assert self._filled is not None, "a step was begun"
        return self._filled.result() if isinstance(self._filled, Future) else self._filled

    def append(self, sampled: Sequence[tuple[int, tuple[int, ...]]]) -> list[Appended]:
        """Consume sampled tokens, and append the tokens that are forced after them."""
        return self._table.append(sampled)
