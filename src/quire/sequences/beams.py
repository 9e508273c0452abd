"""What a beam search has in hand between two steps: candidates, hypotheses, and how beams came about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.sequences.logprobs import TokenLogprobs
from quire.sequences.status import FinishReason


class Candidate(NamedTuple):
    """One way in which a beam may go on.

    Args:
        parent_idx: the beam's place among those that were advanced together.
        token_id: what comes next.
        score: the sum of the log probabilities of the beam's output with this token.
        logprobs: of the token, where log probabilities are wanted.
        stop: the stop string that the text with this token reaches, if any.
    """

    parent_idx: int
    token_id: int
    score: float
    logprobs: TokenLogprobs | None = None
    stop: str | None = None


class BeamStep(NamedTuple):
    """One chosen token, and those before it; beams that part share what is before."""

    logprobs: TokenLogprobs | None
    previous: BeamStep | None


class Hypothesis(NamedTuple):
    """An output that has ended.

    Args:
        token_ids: the output.
        score: its sum of log probabilities, divided by its length to the power of the length penalty.
        reason: why it ended.
        stop_reason: the stop string or the request's own stop token that ended it.
        last_step: step of its last token.
    """

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason
    stop_reason: str | int | None
    last_step: BeamStep

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log probabilities of its tokens, where they are wanted."""
        steps = beam_steps(self.last_step)
        return [step.logprobs for step in steps if step.logprobs is not None][::-1]


@dataclass(slots=True)
class BeamSearch:
    """How far one request's search is; decided on by `quire.decoding.beams`.

    Args:
        scores: sums of log probabilities of the beams that run, by their place among the request's sequences.
        last_steps: step of the last token of each of these beams, by the same index; None for one without output.
        finished: the best hypotheses so far, as many as the width at most, best first.
        num_tokens: tokens that were chosen so far, for beams that were given up too.
        num_computed: of those, tokens that went through the model.
    """

    scores: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    last_steps: dict[int, BeamStep | None] = field(default_factory=lambda: {0: None})
    finished: list[Hypothesis] = field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0

    def num_dropped(self, kept: Iterable[Hypothesis]) -> int:
        """Return how many of the chosen tokens are in none of some hypotheses."""
        # Trails hold on to what they name, so no two have one id.
        return self.num_tokens - len({id(step) for hypothesis in kept for step in beam_steps(hypothesis.last_step)})


def beam_steps(last_step: BeamStep | None) -> list[BeamStep]:
    """Return a step and all steps before it, the last one first."""
    steps = []
    while last_step is not None:
        steps.append(last_step)
        last_step = last_step.previous
    return steps
