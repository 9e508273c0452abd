"""The constraints of all open sequences; their masks are filled while the model runs, or before it.

```
 this thread                   open, close, begin |  layers ...  | apply the masks to logits | append forced tokens
 thread or process of masks                       '-> fill ... ->'                           '-> in the process ->'
```

If the model's threads occupy all cores, filling masks would slow one of them, and the others would wait for it at the
end of each kernel. In this case, this thread waits for the masks before the layers.

Outputs with a thinking budget and without a grammar are masked in this process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import QuireError
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence
from quire.sequences.structured import GrammarSource
from quire.text.structured.compiled_grammar import Grammar
from quire.text.structured.grammar_backend import MaskSource
from quire.text.structured.local_grammars import LocalMasks
from quire.text.structured.output_constraint import OutputConstraint
from quire.text.structured.state_table import Appended, Masked, MaskJob, StateTable, StepStart, mask_bytes


class MaskedOutput:
    """One sequence's constraint, from which the sampler reads masks.

    Attributes:
        error: reason why the sequence cannot continue, which ends its request; else None.
        num_prompt: number of tokens before the output.
    """

    __slots__ = ("_first", "_masks", "_part", "error", "num_prompt")

    def __init__(self, part: _MaskedPart, num_prompt: int) -> None:
        self.error: str | None = None
        self.num_prompt = num_prompt
        self._part = part
        self._masks: torch.Tensor | tuple[()] = ()
        self._first = 0

    def mask_at(self, position: int) -> torch.Tensor | None:
        """Return the bitmask of the tokens allowed at a position of prompt and output, int32 [ceil(V / 32)].

        Returns:
            None after a draft that the grammar forbids, or that ends the output: such a draft is never accepted.
        """
        self._part.collect()
        idx = position - self._first
        return self._masks[idx] if 0 <= idx < len(self._masks) else None

    def take(self, masked: Masked, rows: torch.Tensor) -> None:
        """Store the masks of a step, int32 [n, ceil(V / 32)]."""
        self._first, self._masks, self.error = masked.position, rows[: masked.num_masks], masked.error

    def fail(self, error: str) -> None:
        """Store an error, and drop the masks."""
        self._masks, self.error = (), error


class _MaskedPart:
    """The sequences whose masks come from one source."""

    def __init__(self, source: MaskSource, row_bytes: int) -> None:
        self.open: dict[int, MaskedOutput] = {}
        self._source = source
        self._row_bytes = row_bytes
        self._closed: list[int] = []
        self._opened: list[tuple[int, OutputConstraint]] = []
        self._waiting: tuple[MaskJob, ...] | None = None

    def close_sequence(self, seq_id: int) -> None:
        if self.open.pop(seq_id, None) is not None:
            self._closed.append(seq_id)

    def open_sequence(self, seq_id: int, constraint: OutputConstraint) -> MaskedOutput:
        self._opened.append((seq_id, constraint))
        output = self.open[seq_id] = MaskedOutput(self, constraint.num_prompt)
        return output

    def begin(self, items: Sequence[ScheduledSequence]) -> None:
        """Ask for the masks of a step."""
        self.collect()  # masks of a failed step, which were not read
        jobs = tuple(job for item in items if (job := self._mask_job(item)) is not None) if self.open else ()
        if not jobs and not self._closed and not self._opened:
            return
        step = StepStart(tuple(self._closed), tuple(self._opened), jobs)
        self._closed, self._opened = [], []
        try:
            self._source.begin(step)
            self._waiting = jobs
        except QuireError as error:
            self._fail(str(error))

    def collect(self) -> None:
        """Wait for the masks of the step, if they were not collected yet."""
        if self._waiting is None:
            return
        jobs, self._waiting = self._waiting, None
        try:
            masked, masks = self._source.masks()
        except QuireError as error:
            self._fail(str(error))
            return
        num_words = self._row_bytes // 4
        rows = torch.frombuffer(masks, dtype=torch.int32) if masks else torch.empty(0, dtype=torch.int32)
        parts = torch.split(rows.view(-1, num_words), [job.num_rows for job in jobs])
        for job, one, part in zip(jobs, masked, parts, strict=True):
            output = self.open.get(job.seq_id)
            if output is not None:  # None if it was closed after a failed step
                output.take(one, part)

    def append(self, sampled: Sequence[tuple[int, tuple[int, ...]]]) -> list[Appended]:
        """Return sampled tokens with the forced tokens after them."""
        if not sampled:
            return []
        self.collect()
        try:
            return self._source.append(sampled)
        except QuireError as error:
            self._fail(str(error))
            return [Appended(token_ids, str(error)) for _, token_ids in sampled]

    def _mask_job(self, item: ScheduledSequence) -> MaskJob | None:
        output = self.open.get(item.seq_id)
        if output is None:
            return None
        is_sampled, num_prompt = item.num_samples > 0, output.num_prompt
        num_certain = len(item.token_ids) - item.num_draft
        draft = tuple(item.token_ids[num_certain:])
        if item.new_sequence is not None:
            return MaskJob(item.seq_id, 0, tuple(item.new_sequence.token_ids[num_prompt:]), draft, is_sampled)
        if not is_sampled:
            return None
        start = max(item.start, num_prompt)
        certain = tuple(item.token_ids[start - item.start : num_certain])
        return MaskJob(item.seq_id, start - num_prompt, certain, draft, True)

    def _fail(self, error: str) -> None:
        """Fail all open sequences: their states are lost."""
        for output in self.open.values():
            output.fail(error)


class GrammarStates:
    """Opens and closes constraints, and fetches their masks and forced tokens.

    Args:
        source: source of the masks of outputs with a grammar.
        vocab_size: V of the logits.
        end_token_ids: tokens that end an output of the model.
    """

    def __init__(self, source: MaskSource, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        row_bytes = mask_bytes(vocab_size)
        self._with_grammar = _MaskedPart(source, row_bytes)
        self._without = _MaskedPart(LocalMasks(StateTable(_no_grammar, vocab_size, end_token_ids)), row_bytes)

    @property
    def num_open(self) -> int:
        """Number of open sequences with a constraint."""
        return len(self._with_grammar.open) + len(self._without.open)

    def close(self, seq_id: int) -> None:
        """Close a sequence that the current plan names as finished."""
        self._with_grammar.close_sequence(seq_id)
        self._without.close_sequence(seq_id)

    def open(self, seq_id: int, new_sequence: NewSequence) -> MaskedOutput | None:
        """Return the constraint of a new sequence; None if it has neither a grammar nor a thinking budget."""
        constraint = OutputConstraint.of(new_sequence)
        if constraint is None:
            return None
        part = self._without if constraint.source is None else self._with_grammar
        return part.open_sequence(seq_id, constraint)

    def begin(self, items: Sequence[ScheduledSequence]) -> None:
        """Fill the masks of a step, or start to fill them."""
        self._with_grammar.begin(items)
        self._without.begin(items)

    def append(self, items: Sequence[ScheduledSequence], results: Sequence[ItemResult]) -> list[ItemResult]:
        """Consume the sampled tokens, and append the tokens that the grammars force after them.

        Args:
            items: sampled items.
            results: one result for each item.
        """
        extended = list(results)
        for part in (self._with_grammar, self._without):
            if not part.open:
                continue
            # An item with several samples is left out: each sample becomes a new sequence with its own state.
            indices = [
                idx
                for idx, (item, result) in enumerate(zip(items, results, strict=True))
                if item.seq_id in part.open and result.error is None and item.num_samples == 1
            ]
            appended = part.append([(items[idx].seq_id, tuple(results[idx].token_ids)) for idx in indices])
            for idx, (token_ids, error) in zip(indices, appended, strict=True):
                result = results[idx]
                if error is not None:
                    extended[idx] = ItemResult(items[idx].seq_id, (), error=error, is_own_fault=True)
                elif len(token_ids) > len(result.token_ids):
                    extended[idx] = result._replace(token_ids=token_ids)
        return extended


def _no_grammar(source: GrammarSource) -> Grammar:
    raise AssertionError(f"a sequence without a grammar has one: {source}")
