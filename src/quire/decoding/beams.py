"""Beam search: the `width` likeliest outputs go on side by side, and those that have ended are kept by their score.

```
 beams              candidates, best first                 the next beams
 0  "a fox"   -->   1 "a dog ran"   0 "a fox sat"   -->    0  "a fox sat"     continued
 1  "a dog"         1 "a dog sat"   0 "a fox ran" ..       1  "a dog ran"     continued
 2  "a cat"                                                2  "a dog sat"     forked from 1: 2 was given up
```

All beams of a request advance in one step. Of their candidates, which the data plane finds, those that end become
hypotheses when they are among the `width` best; the best others are the next beams. It is the search of
`transformers`, its early stopping included, so both find the same outputs with the same scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq

from quire.decoding.stop import end_of_tokens
from quire.sequences.beams import BeamSearch, BeamStep, Candidate, Hypothesis
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Append, BeamEdit, Drop, Edit, Finish, Fork


class Beams:
    """The strategy of a request that searches: its sequences are not advanced each by itself, see `advance_beams`."""

    def num_draws(self, sequence: Sequence) -> int:  # noqa: ARG002
        """Return 1: the logits are asked for; the beams fork once the candidates are known."""
        return 1

    def advance(self, sequence: Sequence, token_ids: Seq[int]) -> Seq[Edit]:  # noqa: ARG002
        """Return nothing: no beam is given a token of its own."""
        return ()


def num_candidates(request: Request) -> int:
    """Return how many candidates of a step must be known: however many of them end, `width` others are left."""
    return request.params.num_sequences * max(2, 1 + len(request.end_ids))


def advance_beams(search: BeamSearch, beams: Seq[Sequence], candidates: Seq[Candidate]) -> list[BeamEdit]:
    """Take in the candidates of a step, and say what becomes of the beams.

    Args:
        search: the request's; changed.
        beams: its sequences that run, by place, all of the same length.
        candidates: best first; all those there are, where they are fewer than `num_candidates`.

    Returns:
        First what is given up, then forks, then appends, each with its candidate. Or, when the search is over,
        finishes: with an error where there was no candidate at all, and nothing had ended.
    """
    request = beams[0].request
    width = request.params.num_sequences
    search.num_computed += len(beams) if beams[0].num_output else 0
    ended: list[Hypothesis] = []
    going: list[tuple[int, Candidate]] = []
    for rank, candidate in enumerate(candidates):
        end = _end_of(beams[candidate.parent_idx], candidate)
        if end is None:
            if len(going) < width:
                going.append((rank, candidate))
        elif rank < width:
            ended.append(_hypothesis(search, beams[candidate.parent_idx], candidate, *end))
    search.num_tokens += len(ended)
    # The sort is stable: of equals, who ended first stays.
    search.finished = sorted([*search.finished, *ended], key=lambda known: -known.score)[:width]
    if not going or _is_over(request, search, beams[0].num_output + 1, going[0][1].score):
        reason = FinishReason.STOP if search.finished else FinishReason.ERROR
        search.scores, search.last_steps = {}, {}
        return [Finish(beam.sample_idx, reason) for beam in beams]
    search.num_tokens += len(going)
    return _continue_beams(search, beams, going)


def _end_of(beam: Sequence, candidate: Candidate) -> tuple[FinishReason, str | int | None] | None:
    """Say whether an output ends with a candidate; a stop string wins over all else."""
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
    """Say whether no beam can, or need, become a better hypothesis.

    Args:
        request: the search's.
        search: with all that has ended.
        num_output: tokens of the beams' outputs.
        best_score: sum of log probabilities of the best beam.
    """
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


def _continue_beams(search: BeamSearch, beams: Seq[Sequence], going: Seq[tuple[int, Candidate]]) -> list[BeamEdit]:
    """Return the edits that leave the beams which go on: each parent's first child continues it, others fork."""
    children: dict[int, list[tuple[int, Candidate]]] = defaultdict(list)
    for rank, candidate in going:
        children[candidate.parent_idx].append((rank, candidate))
    kept = {beams[parent_idx].sample_idx for parent_idx in children}
    free = iter(place for place in range(len(going) + len(beams)) if place not in kept)
    forks: list[BeamEdit] = []
    appends: list[BeamEdit] = []
    scores: dict[int, float] = {}
    last_steps: dict[int, BeamStep | None] = {}
    for parent_idx, own in children.items():
        parent_place = beams[parent_idx].sample_idx
        for child_idx, (rank, candidate) in enumerate(own):
            place = next(free) if child_idx else parent_place
            if child_idx:
                forks.append(Fork(place, parent_place))
            appends.append(Append(place, rank))
            scores[place] = candidate.score
            last_steps[place] = BeamStep(candidate.logprobs, search.last_steps[parent_place])
    search.scores, search.last_steps = scores, last_steps
    drops: list[BeamEdit] = [Drop(beam.sample_idx) for beam in beams if beam.sample_idx not in kept]
    return drops + forks + appends
