"""The grammar states of all open sequences, and the masks of a step.

This module imports no torch, since the process of `quire.text.structured.grammar_server` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from quire.errors import RequestError, describe
from quire.sequences.structured import GrammarSource
from quire.text.structured.compiled_grammar import Grammar
from quire.text.structured.grammar_state import GrammarState
from quire.text.structured.output_constraint import OutputConstraint
from quire.text.structured.thinking import ThinkingGrammar, bitmask_without

LOST: Final = "the process of the grammars has ended (structured_outputs)"


class MaskJob(NamedTuple):
    """The mask work of one sequence in a step.

    Args:
        seq_id: id of the sequence.
        start: index in the output of the first of `token_ids`.
        token_ids: known tokens of the output from `start` on.
        draft: drafted tokens after them.
        is_sampled: True if a token is sampled in this step.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    draft: tuple[int, ...]
    is_sampled: bool

    @property
    def num_rows(self) -> int:
        """Number of rows that may need a mask."""
        return 1 + len(self.draft) if self.is_sampled else 0


class StepStart(NamedTuple):
    """The changes and the work at the start of a step.

    Args:
        closed: ids of sequences that have finished.
        opened: ids and constraints of new sequences, which may be forks of the closed ones.
        jobs: mask work, at most one job of each open sequence.
    """

    closed: tuple[int, ...]
    opened: tuple[tuple[int, OutputConstraint], ...]
    jobs: tuple[MaskJob, ...]


class Masked(NamedTuple):
    """The masks of one job.

    Args:
        position: position, in prompt and output, of the token to which the first mask applies.
        num_masks: number of rows that have a mask; the others are for drafts that are never accepted.
        error: reason why the sequence cannot continue, or None.
    """

    position: int
    num_masks: int
    error: str | None


class Appended(NamedTuple):
    """The new tokens of a sequence after a step.

    Args:
        token_ids: the sampled tokens, and the tokens that the grammar forces after them.
        error: error of the grammar, or None.
    """

    token_ids: tuple[int, ...]
    error: str | None = None


# A result for each job of a step; and the masks, one for each of the `num_rows` of all jobs, in their order.
Masks = tuple[list[Masked], bytearray]


class StateTable:
    """Opens, advances and closes grammar states, and fills their masks.

    Args:
        compile_source: function that returns a compiled grammar; it raises `ValueError` where it does not compile.
        vocab_size: V of the logits.
        end_token_ids: tokens that end an output of the model.
    """

    def __init__(
        self, compile_source: Callable[[GrammarSource], Grammar], vocab_size: int, end_token_ids: tuple[int, ...]
    ) -> None:
        self._compile = compile_source
        self._vocab_size = vocab_size
        self._row_bytes = mask_bytes(vocab_size)
        self._end_token_ids = end_token_ids
        self._open: dict[int, GrammarState] = {}
        self._num_steps = 0

    def begin(self, step: StepStart) -> Masks:
        """Close and open sequences, and fill the masks of a step."""
        finished = [state for seq_id in step.closed if (state := self._open.pop(seq_id, None)) is not None]
        for seq_id, constraint in step.opened:
            self._open[seq_id] = self.open(constraint, finished)
        self._num_steps += 1
        masks = bytearray(self._row_bytes * sum(job.num_rows for job in step.jobs))
        rows = [memoryview(masks)[at : at + self._row_bytes] for at in range(0, len(masks), self._row_bytes)]
        masked, first = [], 0
        for job in step.jobs:
            masked.append(self._fill(job, rows[first : first + job.num_rows]))
            first += job.num_rows
        return masked, masks

    def open(self, constraint: OutputConstraint, finished: Sequence[GrammarState] = ()) -> GrammarState:
        """Return the grammar state of a new sequence.

        Args:
            constraint: constraint of its output.
            finished: states of sequences that have just finished.
        """
        # Without a grammar, an output may go on after an end token.
        ends = () if constraint.ignores_ends else self._end_token_ids
        output = list(constraint.token_ids)
        # A sibling's matcher has consumed these tokens already. Equal parameters, seeds and lengths of prompts make no
        # sibling: the prompt decides whether the output begins inside thinking.
        has_siblings = bool(output) and constraint.arrival is not None
        states = (*self._open.values(), *finished) if has_siblings else ()
        family = [one for one in states if one.arrival == constraint.arrival]
        siblings = [one for one in family if one.error is None and one.is_prefix_of(output)]
        nearest = max(siblings, key=lambda one: len(one.token_ids), default=None)
        if nearest is not None:
            return nearest.fork(constraint)
        try:
            grammar = None if constraint.source is None else self._compile(constraint.source)
            return GrammarState(self._after_thinking(grammar, constraint), constraint, ends)
        except (RequestError, ValueError) as error:
            return GrammarState(None, constraint, ends, f"the grammar of the output does not compile: {error}")

    def _after_thinking(
        self, grammar: Grammar | None, constraint: OutputConstraint
    ) -> Grammar | ThinkingGrammar | None:
        """Return the grammar; for a model that thinks, it applies after the end of thinking."""
        thinking, start = constraint.thinking, constraint.thinking_start
        if thinking is None or start is None:
            return grammar
        forbidden = () if grammar is None else self._end_token_ids
        mask = bitmask_without(forbidden, self._vocab_size)
        return ThinkingGrammar(thinking, constraint.max_thinking, start, grammar, mask)

    def _fill(self, job: MaskJob, rows: Sequence[memoryview]) -> Masked:
        """Sync a grammar state with the known tokens, and fill its masks."""
        state = self._open.get(job.seq_id)
        if state is None:  # it was open in a process that has ended
            return Masked(0, 0, LOST)
        state.begin_step(self._num_steps)
        num_masks = 0
        try:  # an error ends this sequence's request only
            state.sync(job.start, job.token_ids)
            if job.is_sampled:
                num_masks = state.fill(rows, job.draft)
        except Exception as error:
            state.error = failure(error)
        return Masked(state.position, num_masks, state.error)

    def append(self, sampled: Sequence[tuple[int, tuple[int, ...]]]) -> list[Appended]:
        """Consume sampled tokens, and append the tokens that the grammars force after them.

        Args:
            sampled: id of an open sequence, and its tokens.
        """
        appended = []
        for seq_id, token_ids in sampled:
            state = self._open.get(seq_id)
            try:
                appended.append(Appended(token_ids, LOST) if state is None else Appended(state.append(token_ids)))
            except Exception as error:
                appended.append(Appended(token_ids, failure(error)))
        return appended


def mask_bytes(vocab_size: int) -> int:
    """Return the number of bytes of a mask."""
    return -(-vocab_size // 32) * 4


def failure(error: Exception) -> str:
    """Return the error message for a request whose grammar raised an error."""
    return f"the grammar of the output failed: {describe(error)}"
