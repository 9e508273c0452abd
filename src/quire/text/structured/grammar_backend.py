"""The interface of a model's grammars, and the choice of the process that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from quire.sequences.structured import GrammarSource
from quire.text.structured.grammar_process import GrammarProcess
from quire.text.structured.grammar_setup import GrammarModel
from quire.text.structured.local_grammars import HeldGrammar, LocalGrammars
from quire.text.structured.state_table import Appended, Masks, StepStart

# `llguidance` holds the interpreter lock for some 45 ms to open a tokenizer of this size, 100 ms at twice the size.
MAX_LOCAL_VOCAB: Final = 1 << 14


class MaskSource(Protocol):
    """Fills masks and appends forced tokens, one step at a time."""

    def begin(self, step: StepStart) -> None:
        """Fill the masks of a step, or start to fill them."""

    def masks(self) -> Masks:
        """Wait for the masks of the last step that was begun.

        Raises:
            WorkerError: they are lost, with the states of all sequences.
        """

    def append(self, sampled: Sequence[tuple[int, tuple[int, ...]]]) -> list[Appended]:
        """Consume sampled tokens, and append the tokens that the grammars force; see `StateTable.append`.

        Raises:
            WorkerError: the states of all sequences are lost.
        """


class GrammarBackend(Protocol):
    """Grammars of one model; `start`, `hold` and `close` are thread-safe.

    Attributes:
        model: the model.
    """

    model: GrammarModel

    def start(self) -> object:
        """Prepare for the first grammar, without waiting."""

    def hold(self, source: GrammarSource, num_bytes: int) -> HeldGrammar:
        """Compile a grammar, which stays compiled while the returned object exists.

        Args:
            source: the grammar.
            num_bytes: memory that it takes.

        Raises:
            ValueError: it does not compile; the message says why.
            UnsupportedFeature: `llguidance` cannot read the tokenizer.
            WorkerError: a process does not start, or has ended.
        """

    def mask_source(self, *, overlaps: bool) -> MaskSource:
        """Return the source of the masks, for one thread.

        Args:
            overlaps: True to fill masks while the model runs.
        """

    def close(self) -> None:
        """End the processes; callers that wait for one get an error."""


def open_grammars(model: GrammarModel) -> GrammarBackend:
    """Return the grammars of a model: in a separate process if opening the tokenizer would block this one for long."""
    return LocalGrammars(model) if model.vocab_size <= MAX_LOCAL_VOCAB else GrammarProcess(model)
