"""Decoding strategies: from the tokens drawn in a step to edits of a request's sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile

from quire.decoding.beams import Beams
from quire.decoding.custom import CustomStrategy
from quire.decoding.stop import end_of_tokens
from quire.sequences.sequence import Request, Sequence
from quire.sequences.strategy import Append, Edit, Finish, Fork, Strategy, Truncate


class Sampling:
    """Parallel samples: the prompt is computed once, its last logits give all first tokens, and the prompt forks."""

    def num_draws(self, sequence: Sequence) -> int:
        """Return the samples that are still to fork off a prompt, itself included; else 1."""
        if len(sequence.tokens) > sequence.num_prompt:
            return 1
        return sequence.request.params.num_sequences - len(sequence.request.sequences) + 1

    def advance(self, sequence: Sequence, token_ids: Seq[int]) -> Seq[Edit]:
        """Return one append per token; before it, one fork for each sample after the first; finishes last.

        A run is cut where the sequence ends.
        """
        if self.num_draws(sequence) == 1:
            return _appends(sequence, token_ids)
        first = sequence.sample_idx
        # Forks come first: a child starts from the prompt, before its parent grows.
        edits: list[Edit] = [Fork(first + draw_idx, first) for draw_idx in range(1, len(token_ids))]
        finishes: list[Finish] = []
        for draw_idx, token_id in enumerate(token_ids):
            edits.append(Append(first + draw_idx, draw_idx))
            end = end_of_tokens(sequence, token_id)
            if end is not None:
                finishes.append(Finish(first + draw_idx, *end))
        edits += finishes
        return edits


def _appends(sequence: Sequence, token_ids: Seq[int]) -> list[Edit]:
    """Append a run of tokens up to the one that ends the sequence, and drop the drafts that were not accepted."""
    sample_idx, draft = sequence.sample_idx, sequence.draft
    edits: list[Edit] = []
    finish = None
    for draw_idx, token_id in enumerate(token_ids):
        edits.append(Append(sample_idx, draw_idx))
        end = end_of_tokens(sequence, token_id, draw_idx)
        if end is not None:
            finish = Finish(sample_idx, *end)
            break
    if draft:
        # The token behind the accepted drafts is not computed yet, even where it is the draft that comes next.
        pairs = zip(draft, token_ids[: len(edits)], strict=False)
        num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if finish is None:
            num_accepted = min(num_accepted, len(edits) - 1)
        edits.append(Truncate(sample_idx, len(sequence.tokens) + num_accepted))
    return edits if finish is None else [*edits, finish]


SAMPLING = Sampling()
BEAMS = Beams()


def strategy_of(request: Request) -> Strategy[Sequence]:
    """Return how a request is decoded."""
    if request.params.beam_width is not None:
        return BEAMS
    own = request.params.strategy
    return SAMPLING if own is None else CustomStrategy(own)


def default_edit_of(strategy: Strategy[Sequence], sample_idx: int) -> Append | None:
    """Return what almost every token of a sample comes to: see `Sequence.default_edit`."""
    return Append(sample_idx, 0) if strategy is SAMPLING else None
