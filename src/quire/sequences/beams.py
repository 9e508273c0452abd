"""State of a beam search between two steps: candidates, hypotheses, and the tokens of each beam."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.sequences.logprobs import TokenLogprobs
from quire.sequences.status import FinishReason


class Candidate(NamedTuple):
    """A possible next token of a beam.

    Args:
        parent_idx: index of the beam in its group.
        token_id: next token.
        score: sum of the log probabilities of the beam's output with this token.
        logprobs: log probabilities of the token; None if they are not requested.
        stop: stop string that the text contains with this token, if any.
    """

    parent_idx: int
    token_id: int
    score: float
    logprobs: TokenLogprobs | None = None
    stop: str | None = None


class BeamStep(NamedTuple):
    """One chosen token, linked to the previous one; forked beams share the steps before the fork."""

    logprobs: TokenLogprobs | None
    previous: BeamStep | None


class Hypothesis(NamedTuple):
    """A finished output.

    Args:
        token_ids: tokens of the output.
        score: sum of the log probabilities, divided by the length to the power of the length penalty.
        reason: finish reason.
        stop_reason: stop string or the request's own stop token that ended the output.
        last_step: step of the last token.
    """

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason
    stop_reason: str | int | None
    last_step: BeamStep

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log probabilities of the tokens; empty if they are not requested."""
        steps = beam_steps(self.last_step)
        return [step.logprobs for step in steps if step.logprobs is not None][::-1]


@dataclass(slots=True)
class BeamSearch:
    """State of one request's search; updated by `quire.sequences.decoding.beams`.

    Args:
        scores: sum of the log probabilities of each running beam, by `sample_idx`.
        last_steps: step of the last token of each running beam, by `sample_idx`; None for a beam without output.
        finished: best hypotheses so far, best first; at most `beam_width`.
        num_tokens: number of tokens chosen so far, including tokens of dropped beams.
        num_computed: number of these tokens that were inputs of the model.
    """

    scores: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    last_steps: dict[int, BeamStep | None] = field(default_factory=lambda: {0: None})
    finished: list[Hypothesis] = field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0

    def num_dropped(self, returned: Iterable[Hypothesis]) -> int:
        """Return the number of chosen tokens that are in none of the returned hypotheses."""
        # Ids are unique, since the hypotheses keep all of their steps alive.
        return self.num_tokens - len({id(step) for hypothesis in returned for step in beam_steps(hypothesis.last_step)})


def beam_steps(last_step: BeamStep | None) -> list[BeamStep]:
    """Return a step and all previous ones, the last step first."""
    steps = []
    while last_step is not None:
        steps.append(last_step)
        last_step = last_step.previous
    return steps
