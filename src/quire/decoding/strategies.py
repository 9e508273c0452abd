"""Decoding strategies: from the tokens drawn in a step to edits of a request's sequences."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Protocol

from quire.decoding.edits import Append, Edit, Finish, Fork
from quire.decoding.stop import end_of_tokens
from quire.sequences.sequence import Sequence


class Strategy(Protocol):
    """How a request is decoded; stateless, all state is in the request."""

    def num_draws(self, sequence: Sequence) -> int:
        """Return how many tokens to draw from the logits of the sequence's last token."""
        ...

    def advance(self, sequence: Sequence, token_ids: Tokens[int]) -> list[Edit]:
        """Return what to do with the tokens drawn for a sequence."""
        ...


class Sampling:
    """Parallel samples: the prompt is computed once, its last logits give all first tokens, and the prompt forks."""

    def num_draws(self, sequence: Sequence) -> int:
        """Return the samples that are still to fork off a prompt, itself included; else 1."""
        if len(sequence.tokens) > sequence.num_prompt:
            return 1
        return sequence.request.params.num_sequences - len(sequence.request.sequences) + 1

    def advance(self, sequence: Sequence, token_ids: Tokens[int]) -> list[Edit]:
        """Return one append per token; before it, one fork for each sample after the first; finishes last."""
        first = sequence.sample_idx
        if len(token_ids) == 1:
            (token_id,) = token_ids
            append = Append(first, token_id, 0)
            end = end_of_tokens(sequence, token_id)
            return [append] if end is None else [append, Finish(first, *end)]
        # Forks come first: a child starts from the prompt, before its parent grows.
        edits: list[Edit] = [Fork(first + draw_idx) for draw_idx in range(1, len(token_ids))]
        finishes: list[Finish] = []
        for draw_idx, token_id in enumerate(token_ids):
            edits.append(Append(first + draw_idx, token_id, draw_idx))
            end = end_of_tokens(sequence, token_id)
            if end is not None:
                finishes.append(Finish(first + draw_idx, *end))
        edits += finishes
        return edits
