"""The sampler: from a step's logits to its tokens, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from math import isfinite

import torch

from quire.execution.sampling.logits_processing import KeepTokens
from quire.execution.sampling.row_sampling import Row, SamplingState, sample_rows
from quire.execution.sampling.token_history import TokenHistory
from quire.execution.sampling.verification import run_of, verify
from quire.ops.pytorch.torch_rows import apply_token_bitmask
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, StepPlan
from quire.sequences.decoding.drafting import UNKNOWN
from quire.text.structured.mask_filler import GrammarStates


class Sampler:
    """Samples tokens, and keeps the sampling state of each open sequence.

    Args:
        device: device of the logits.
        grammar_states: grammar states of constrained outputs; None where no request can be constrained.
        keep: applies their masks.

    Attributes:
        states: sampling states of the open sequences.
        keep: the argument of this name.
    """

    def __init__(
        self, device: torch.device, grammar_states: GrammarStates | None = None, keep: KeepTokens = apply_token_bitmask
    ) -> None:
        self._device = device
        self._grammar_states = grammar_states
        self.keep = keep
        self.states: dict[int, SamplingState] = {}
        # Open sequences that are not plain greedy; those with a token history; those with prompt log probabilities.
        self._special: dict[int, SamplingState] = {}
        self._with_history: dict[int, TokenHistory] = {}
        self._with_prompt: dict[int, SamplingState] = {}
        # True while sequences with a grammar are open, and for one more step, which closes the last ones.
        self._has_grammars = False

    @property
    def num_open(self) -> int:
        """Number of open sequences."""
        return len(self.states)

    def begin_step(self, plan: StepPlan) -> None:
        """Drop the finished sequences, add the new ones, and sync histories and grammars to this step's tokens."""
        for seq_id in plan.finished_ids:
            self._close(seq_id)
        for item in plan.items:
            if item.new_sequence is not None:
                self._open(item.seq_id, item.new_sequence)
        self.begin(plan.items)

    def begin(self, items: Sequence[ScheduledSequence]) -> None:
        """Sync histories and grammar states to the tokens before those that are sampled."""
        if self._with_history:
            for item in items:
                history = self._with_history.get(item.seq_id)
                # The token of a placeholder is added to the history when it is read.
                if history is not None and item.token_ids[0] != UNKNOWN:
                    # Drafts are added one by one, as they are accepted.
                    certain = item.token_ids[: len(item.token_ids) - item.num_draft]
                    history.sync(item.start, certain, is_end=item.num_samples > 0)
        if self._grammar_states is not None and self._has_grammars:
            self._grammar_states.begin(items)
            self._has_grammars = self._grammar_states.num_open > 0

    def masks_drafts(self, items: Iterable[ScheduledSequence]) -> bool:
        """Say whether a grammar may mask rows of drafts: then the drafts must be known when the step begins."""
        opened = (item.new_sequence for item in items if item.num_draft)
        return self._has_grammars or any(each is not None and each.params.is_constrained for each in opened)

    def _close(self, seq_id: int) -> None:
        if self._grammar_states is not None:
            self._grammar_states.close(seq_id)
        for known in (self.states, self._special, self._with_history, self._with_prompt):
            known.pop(seq_id, None)

    def _open(self, seq_id: int, new_sequence: NewSequence) -> None:
        self._close(seq_id)  # an opening replaces all that was known
        grammar_state = None if self._grammar_states is None else self._grammar_states.open(seq_id, new_sequence)
        self._has_grammars |= grammar_state is not None
        state = self.states[seq_id] = SamplingState(new_sequence, self._device, grammar_state)
        history = state.adjustments.history
        if history is not None:
            self._with_history[seq_id] = history
        if state.prompt_ids:
            self._with_prompt[seq_id] = state
        if not state.is_plain:
            self._special[seq_id] = state

    def sample(
        self,
        logits: torch.Tensor,
        items: Sequence[ScheduledSequence],
        positions: torch.Tensor | None = None,  # noqa: ARG002
    ) -> list[ItemResult]:
        """Sample every item's tokens.

        A row whose logits are not finite is an error of its item alone, unless a draft before it is rejected.

        Args:
            logits: float32 [R, V], overwritten: the rows of each item's last token, and of the `num_draft` before it.
            items: those with `num_samples` of at least 1, in any order; no item's result depends on the others.
            positions: position of the token that each row samples, int64 [R] on the device, if it is there.
        """
        if self.is_greedy(items):
            results = self.take_likeliest(*logits.max(-1), items)
            if results is not None:
                return results
        states = [self.states[item.seq_id] for item in items]
        if len(logits) > len(items):
            results = verify(logits, items, states, self.keep)
        else:
            rows = [
                Row(state, item.start + len(item.token_ids), item.num_samples)
                for state, item in zip(states, items, strict=True)
            ]
            drawn = sample_rows(logits, rows, self.keep)
            results = [one.result_of(item) for item, one in zip(items, drawn, strict=True)]
        return results if self._grammar_states is None else self._grammar_states.append(items, results)

    def take_likeliest(
        self, greatest: torch.Tensor, chosen: torch.Tensor, items: Sequence[ScheduledSequence]
    ) -> list[ItemResult] | None:
        """Return the results of greedy sampling, or None where the greatest logit of some row is not finite.

        Args:
            greatest: greatest logits, [R] of float32.
            chosen: their tokens, [R] of int64.
            items: see `sample`; all are plain greedy.
        """
        if not all(map(isfinite, greatest.tolist())):
            return None
        seq_ids, token_ids = [item.seq_id for item in items], chosen.tolist()
        if len(token_ids) == len(items):
            return plain_results(seq_ids, zip(token_ids, strict=True))
        ends = accumulate(1 + item.num_draft for item in items)
        return plain_results(
            seq_ids,
            [run_of(item, token_ids[end - 1 - item.num_draft : end]) for item, end in zip(items, ends, strict=True)],
        )

    def is_greedy(self, items: Iterable[ScheduledSequence]) -> bool:
        """Say whether all items are sampled greedily, without any other option."""
        special = self._special
        return not any(item.num_samples > 1 or item.seq_id in special for item in items)

    def measures_prompts(self, items: Iterable[ScheduledSequence]) -> bool:
        """Say whether an item has prompt targets."""
        measured = self._with_prompt
        return bool(measured) and any(
            item.seq_id in measured and item.start + 1 < len(measured[item.seq_id].prompt_ids) for item in items
        )

    def prompt_targets(self, item: ScheduledSequence) -> tuple[tuple[int, ...], int]:
        """Return the prompt tokens that the item's first hidden states predict, where the request wants them measured.

        Returns:
            The prompt's tokens at `[start + 1, min(start + len + 1, num_prompt))`, or none; and how many of the
            likeliest tokens to list with each.
        """
        state = self.states[item.seq_id]
        end = item.start + len(item.token_ids) + 1
        return state.prompt_ids[item.start + 1 : end], state.params.prompt_logprobs or 0


def plain_results(seq_ids: Iterable[int], token_ids: Iterable[tuple[int, ...]]) -> list[ItemResult]:
    """Return results that have tokens only, without a Python call for each."""
    fields = zip(seq_ids, token_ids, *map(repeat, ((), (), None, (), False, ())), strict=False)
    return list(map(tuple.__new__, repeat(ItemResult), fields))
