"""Decoding strategies: they turn the tokens of a step into edits of a request's sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile

from quire.sequences.decoding.beams import Beams
from quire.sequences.decoding.custom import CustomStrategy
from quire.sequences.decoding.stop import end_of_tokens
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Append, Edit, Finish, Fork, Strategy, Truncate


class Sampling:
    """Parallel sampling: the last logits of one prefill give the first tokens of all samples, which then fork."""

    def num_draws(self, sequence: Sequence) -> int:
        """Return the number of samples that a prompt still has to fork into, itself included; else 1."""
        if len(sequence.tokens) > sequence.num_prompt:
            return 1
        return sequence.request.params.num_sequences - len(sequence.request.sequences) + 1

    def advance(self, sequence: Sequence, token_ids: Seq[int]) -> Seq[Edit]:
        """Return a fork for each sample after the first, then an append per token, then the finishes.

        Tokens after the end of the sequence are cut off.
        """
        if self.num_draws(sequence) == 1:
            return _appends(sequence, token_ids)
        first = sequence.sample_idx
        # Forks come first: a child copies the prompt before its parent gets a token.
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
    """Return the edits that append tokens up to the end of the sequence, and roll back rejected draft tokens."""
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
        # The token after the accepted drafts is not computed yet, even if it equals the next draft.
        pairs = zip(draft, token_ids[: len(edits)], strict=False)
        num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if finish is None:
            num_accepted = min(num_accepted, len(edits) - 1)
        edits.append(Truncate(sample_idx, len(sequence.tokens) + num_accepted))
    return edits if finish is None else [*edits, finish]


class EndOfPrompt:
    """Ends a sequence once its prompt is computed; no token is appended."""

    def num_draws(self, sequence: Sequence) -> int:  # noqa: ARG002
        """Return 1: the last row of the prompt is read."""
        return 1

    def advance(self, sequence: Sequence, token_ids: Seq[int]) -> Seq[Edit]:  # noqa: ARG002
        """Return the end of the sequence."""
        return (Finish(sequence.sample_idx, FinishReason.STOP),)


SAMPLING = Sampling()
BEAMS = Beams()
END_OF_PROMPT = EndOfPrompt()


def strategy_of(request: Request) -> Strategy[Sequence]:
    """Return the decoding strategy of a request."""
    if request.pooling is not None:
        return END_OF_PROMPT
    if request.params.beam_width is not None:
        return BEAMS
    strategy = request.params.strategy
    return SAMPLING if strategy is None else CustomStrategy(strategy)


def default_edit_of(strategy: Strategy[Sequence], sample_idx: int) -> Append | None:
    """Return the edit of a token that does not end its sample: see `Sequence.default_edit`."""
    return Append(sample_idx, 0) if strategy is SAMPLING else None
