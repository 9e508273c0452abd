"""Beam search: the `width` likeliest outputs are extended in parallel, and the best finished outputs are kept.

```
 beams              candidates, best first                 the next beams
 0  "a fox"   -->   1 "a dog ran"   0 "a fox sat"   -->    0  "a fox sat"     continued
 1  "a dog"         1 "a dog sat"   0 "a fox ran" ..       1  "a dog ran"     continued
 2  "a cat"                                                2  "a dog sat"     forked from 1: 2 was dropped
```

All beams of a request advance in one step. The data plane finds the candidates. Candidates that end become hypotheses
if they are among the `width` best; the best of the others are the next beams. The algorithm, early stopping included,
equals the one of `transformers`, so both find the same outputs with the same scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq

from quire.sequences.beams import BeamSearch, BeamStep, Candidate, Hypothesis
from quire.sequences.decoding.stop import end_of_tokens
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Append, BeamEdit, Drop, Edit, Finish, Fork


class Beams:
    """The strategy of a beam search, whose sequences advance together: see `advance_beams`."""

    def num_draws(self, sequence: Sequence) -> int:  # noqa: ARG002
        """Return 1, so that the logits are computed; the beams fork once the candidates are known."""
        return 1

    def advance(self, sequence: Sequence, token_ids: Seq[int]) -> Seq[Edit]:  # noqa: ARG002
        """Return no edits: tokens are appended by `advance_beams` only."""
        return ()


def num_candidates(request: Request) -> int:
    """Return the number of candidates that a step must find, so that at least `width` of them do not end a beam."""
    return request.params.num_sequences * max(2, 1 + len(request.end_ids))


def advance_beams(search: BeamSearch, beams: Seq[Sequence], candidates: Seq[Candidate]) -> list[BeamEdit]:
    """Update a search with the candidates of a step, and return the edits of its beams.

    Args:
        search: state of the request's search; updated in place.
        beams: running sequences of the request by `sample_idx`, all of the same length.
        candidates: candidates, best first; fewer than `num_candidates` only where no others exist.

    Returns:
        Drops, then forks, then appends with the index of their candidate. When the search is over, finishes instead:
        with an error where there is no candidate and no hypothesis.
    """
    request = beams[0].request
    width = request.params.num_sequences
    search.num_computed += len(beams) if beams[0].num_output else 0
    ended: list[Hypothesis] = []
    going_on: list[tuple[int, Candidate]] = []
    for rank, candidate in enumerate(candidates):
        end = _end_of(beams[candidate.parent_idx], candidate)
        if end is None:
            if len(going_on) < width:
                going_on.append((rank, candidate))
        elif rank < width:
            ended.append(_hypothesis(search, beams[candidate.parent_idx], candidate, *end))
    search.num_tokens += len(ended)
    # The sort is stable: of hypotheses with equal scores, the one that ended first stays.
    search.finished = sorted([*search.finished, *ended], key=lambda hypothesis: -hypothesis.score)[:width]
    if not going_on or _is_over(request, search, beams[0].num_output + 1, going_on[0][1].score):
        reason = FinishReason.STOP if search.finished else FinishReason.ERROR
        search.scores, search.last_steps = {}, {}
        return [Finish(beam.sample_idx, reason) for beam in beams]
    search.num_tokens += len(going_on)
    return _continue_beams(search, beams, going_on)


def _end_of(beam: Sequence, candidate: Candidate) -> tuple[FinishReason, str | int | None] | None:
    """Return why an output ends with a candidate, or None; a stop string takes precedence."""
    if candidate.stop is not None:
        return FinishReason.STOP, candidate.stop
    return end_of_tokens(beam, candidate.token_id)


def _hypothesis(
    search: BeamSearch, beam: Sequence, candidate: Candidate, reason: FinishReason, stop_reason: str | int | None
) -> Hypothesis:
    output = (*beam.output_token_ids, candidate.token_id)
    score = candidate.score / len(output) ** beam.request.params.length_penalty
    return Hypothesis(
        output, score, reason, stop_reason, BeamStep(candidate.logprobs, search.last_steps[beam.sample_idx])
    )


def _is_over(request: Request, search: BeamSearch, num_output: int, best_score: float) -> bool:
    """Return whether the search is complete: no beam can become a better hypothesis, or early stopping applies."""
    params = request.params
    if len(search.finished) < params.num_sequences:
        return False
    if params.early_stopping is True:
        return True
    best_length = num_output
    if params.early_stopping == "never" and params.length_penalty > 0:
        best_length = request.max_total_tokens - request.num_prompt
    best_possible: float = best_score / best_length**params.length_penalty
    return best_possible <= search.finished[-1].score


def _continue_beams(search: BeamSearch, beams: Seq[Sequence], going_on: Seq[tuple[int, Candidate]]) -> list[BeamEdit]:
    """Return the edits that make the next beams: the first child of a parent continues it, the others fork."""
    children: dict[int, list[tuple[int, Candidate]]] = defaultdict(list)
    for rank, candidate in going_on:
        children[candidate.parent_idx].append((rank, candidate))
    continued = {beams[parent_idx].sample_idx for parent_idx in children}
    free = iter(sample_idx for sample_idx in range(len(going_on) + len(beams)) if sample_idx not in continued)
    forks: list[BeamEdit] = []
    appends: list[BeamEdit] = []
    scores: dict[int, float] = {}
    last_steps: dict[int, BeamStep | None] = {}
    for parent_idx, ranked in children.items():
        parent_sample_idx = beams[parent_idx].sample_idx
        for child_idx, (rank, candidate) in enumerate(ranked):
            sample_idx = next(free) if child_idx else parent_sample_idx
            if child_idx:
                forks.append(Fork(sample_idx, parent_sample_idx))
            appends.append(Append(sample_idx, rank))
            scores[sample_idx] = candidate.score
            last_steps[sample_idx] = BeamStep(candidate.logprobs, search.last_steps[parent_sample_idx])
    search.scores, search.last_steps = scores, last_steps
    drops: list[BeamEdit] = [Drop(beam.sample_idx) for beam in beams if beam.sample_idx not in continued]
    return drops + forks + appends
