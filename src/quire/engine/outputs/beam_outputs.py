"""Outputs of the best samples or beams of a request, which are held back until all have ended.

The texts of a beam search have stop strings that end candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from quire.engine.outputs.logprobs import FlatLogprobs
from quire.engine.outputs.outputs import CompletionOutput
from quire.engine.outputs.text import SampleText
from quire.scheduling.plan import Candidate
from quire.sequences.beams import Hypothesis
from quire.sequences.decoding.stop import end_of_tokens
from quire.sequences.sequence import Request
from quire.sequences.sequence import Sequence as Beam
from quire.sequences.status import FinishReason
from quire.text.tokenizers.tokenizer import Tokenizer


class BestOf:
    """Holds the samples of a request back until all have ended."""

    __slots__ = ("_num_best", "_samples")

    def __init__(self, num_best: int) -> None:
        self._num_best = num_best
        self._samples: dict[int, CompletionOutput] = {}

    def add(self, deltas: Iterable[CompletionOutput]) -> None:
        """Merge the deltas of some samples."""
        for output in deltas:
            sample = self._samples.get(output.index)
            if sample is None:
                self._samples[output.index] = output
            else:
                sample.add(output)

    def best(self) -> tuple[list[CompletionOutput], int]:
        """Return the samples with the highest mean log probability, best first, and the token count of the others."""
        ranked = sorted(self._samples.values(), key=lambda sample: (-_mean_logprob(sample), sample.index))
        best, others = ranked[: self._num_best], ranked[self._num_best :]
        return [replace(sample, index=idx) for idx, sample in enumerate(best)], sum(len(o.token_ids) for o in others)


def _mean_logprob(sample: CompletionOutput) -> float:
    # A sample without tokens ranks last.
    if sample.cumulative_logprob is None or not sample.token_ids:
        return -inf
    return sample.cumulative_logprob / len(sample.token_ids)


class BeamTexts:
    """The texts of a request's beams, held back until the search ends."""

    __slots__ = ("_candidates", "_request", "_texts", "_tokenizer", "reason")

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._tokenizer = tokenizer
        # Texts of the beams by sample index, and of a step's candidates by rank; both empty without stop strings.
        self._texts: dict[int, SampleText] = {}
        self._candidates: dict[int, SampleText] = {}
        self.reason: FinishReason | None = None

    def find_stops(self, beams: Sequence[Beam], candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return a step's candidates, each with the stop string that its text reaches, if any."""
        if not self._request.params.stop:
            return tuple(candidates)
        self._candidates.clear()
        with_stops = []
        for rank, candidate in enumerate(candidates):
            beam = beams[candidate.parent_idx]
            text = self._candidates[rank] = self._text_of(beam).fork()
            end = end_of_tokens(beam, candidate.token_id)
            is_end_token = end is not None and end[0] is FinishReason.STOP
            _, stop = text.take((candidate.token_id,), beam.num_output + 1, is_end_token=is_end_token)
            with_stops.append(candidate if stop is None else candidate._replace(stop=stop))
        # Only the texts of chosen candidates are needed from here on; see `choose`.
        self._texts.clear()
        return tuple(with_stops)

    def choose(self, sample_idx: int, rank: int) -> None:
        """Record that a candidate of the last step became the beam with a sample index."""
        if self._candidates:
            self._texts[sample_idx] = self._candidates[rank]

    def outputs(self) -> tuple[list[CompletionOutput], int]:
        """Return the best hypotheses, best first, and the number of tokens that are in none of them.

        If the request was aborted or failed, its `n` outputs have only the finish reason.
        """
        search, num_best = self._request.search, self._request.params.n
        assert search is not None
        if self.reason in (FinishReason.ABORT, FinishReason.ERROR):
            ended = [CompletionOutput(index, finish_reason=self.reason.value) for index in range(num_best)]
            return ended, search.num_tokens
        best = search.finished[:num_best]
        outputs = [self._output(index, hypothesis) for index, hypothesis in enumerate(best)]
        return outputs, search.num_dropped(best)

    def _text_of(self, beam: Beam) -> SampleText:
        # A preempted search starts again from the prompt, with no text.
        return self._texts[beam.sample_idx] if beam.num_output else SampleText(self._request, self._tokenizer)

    def _output(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        text, shown = SampleText(self._request, self._tokenizer), []
        num_output = len(hypothesis.token_ids)
        ends_by_token = hypothesis.reason is FinishReason.STOP and not isinstance(hypothesis.stop_reason, str)
        for count, token_id in enumerate(hypothesis.token_ids, 1):
            is_end_token = ends_by_token and count == num_output
            part, _ = text.take((token_id,), count, is_end_token=is_end_token)
            shown.append(part)
        if not isinstance(hypothesis.stop_reason, str):
            shown.append(text.flush())
        output = CompletionOutput(index, "".join(shown), list(hypothesis.token_ids), beam_score=hypothesis.score)
        output.finish_reason, output.stop_reason = hypothesis.reason.value, hypothesis.stop_reason
        if self._request.params.logprobs is not None:
            measured = hypothesis.logprobs
            output.logprobs = FlatLogprobs(self._tokenizer)
            for position in measured:
                output.logprobs.append(position)
            output.cumulative_logprob = sum(position.logprob for position in measured)
        return output
