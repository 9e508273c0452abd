"""The output state of one request: texts, log probabilities and finish reasons of its sequences."""

from __future__ import annotations

from quire.engine.outputs.beam_outputs import BeamTexts
from quire.engine.outputs.best_of import BestOf
from quire.engine.outputs.logprobs import FlatLogprobs, PromptLogprobs
from quire.engine.outputs.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.engine.outputs.text import SampleText
from quire.scheduling.plan import TokenLogprobs
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason
from quire.text.tokenizer import Tokenizer


class RequestState:
    """Collects the deltas of one request in a step.

    Args:
        request: the request.
        prompt: text of its prompt, None for a prompt of token ids.
        tokenizer: the tokenizer; None gives token ids only.
        metrics: times of the request, shared with every output.

    Attributes:
        beams: texts of the beams of a search; None for samples.
    """

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, metrics: RequestMetrics
    ) -> None:
        self.request = request
        self.metrics = metrics
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._samples: dict[int, SampleText] = {}
        self._cumulative: dict[int, float] = {}
        self._deltas: dict[int, CompletionOutput] = {}
        self._ranking = BestOf(request.params.n) if request.params.is_ranked else None
        self.beams = None if request.params.beam_width is None else BeamTexts(request, tokenizer)
        self._prompt_logprobs: PromptLogprobs | None = None
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(FlatLogprobs(tokenizer))

    def add_token(
        self, sequence: Sequence, num_tokens: int, token_id: int, logprobs: TokenLogprobs | None
    ) -> str | None:
        """Append a token to one of the samples.

        Args:
            sequence: the sequence after the step, possibly with further tokens.
            num_tokens: number of tokens of prompt and output up to this token.
            token_id: id of the token.
            logprobs: log probabilities of the token's position, None where they are not requested.

        Returns:
            The stop string that the text completed, if any.
        """
        idx = sequence.sample_idx
        sample = self._samples.get(idx)
        if sample is None:
            sample = self._samples[idx] = SampleText(self.request, self._tokenizer)
        output = self._output(sequence)
        output.token_ids.append(token_id)
        if logprobs is not None:
            if self.request.params.logprobs is not None:
                if output.logprobs is None:
                    output.logprobs = FlatLogprobs(self._tokenizer)
                output.logprobs.append(logprobs)
            output.cumulative_logprob = self._cumulative[idx] = self._cumulative.get(idx, 0.0) + logprobs.logprob
        is_last = sequence.is_finished and num_tokens == len(sequence.tokens)
        is_end_token = is_last and sequence.finish_reason is FinishReason.STOP
        text, stop = sample.take(token_id, num_tokens - sequence.num_prompt, is_end_token=is_end_token)
        output.text += text
        if stop is None and is_last:
            output.text += sample.flush()
        return stop

    def add_finish(self, sequence: Sequence) -> None:
        """Record the end of a sample or of a beam search; text that was held back for a stop string is released."""
        if self.beams is not None:
            self.beams.reason = sequence.finish_reason
            return
        output = self._output(sequence)
        if not output.token_ids and sequence.sample_idx in self._samples:
            output.text += self._samples[sequence.sample_idx].flush()

    def add_prompt_logprobs(self, start: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Add the log probabilities of prompt positions from `start + 1` on; known ones are skipped."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs.add(logprobs[len(self._prompt_logprobs) - start - 1 :])
        self.request.num_known_prompt_logprobs = len(self._prompt_logprobs) - 1

    def take_output(
        self, *, is_finished: bool, error: str | None = None, error_code: str | None = None
    ) -> RequestOutput:
        """Return the output since the last call."""
        deltas, self._deltas = self._deltas, {}
        for index, output in deltas.items():
            # A stop string ends a sequence after `add_token`, and overrides the length or a stop token.
            sequence = self.request.sequences[index]
            if sequence.finish_reason is not None:
                output.finish_reason, output.stop_reason = sequence.finish_reason.value, sequence.stop_reason
        outputs, num_pruned = list(deltas.values()), 0
        if self._ranking is not None:
            self._ranking.add(outputs)
            outputs, num_pruned = self._ranking.best() if is_finished else ([], 0)
        if self.beams is not None and is_finished:
            outputs, num_pruned = self.beams.outputs()
        prompt_logprobs, request = None, self.request
        if self._prompt_logprobs is not None and len(self._prompt_logprobs) == request.num_prompt:
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        self.metrics.num_preemptions = request.num_preemptions
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=is_finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_disk_tokens=request.num_disk_tokens,
            cache_hit_end=None if request.hit_end is None else request.hit_end.value,
            cache_differs_at=request.differs_at,
            prompt_account=request.account,
            num_pruned_tokens=num_pruned,
            error=error,
            error_code=error_code,
            metrics=self.metrics,
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while log probabilities of the prompt are missing."""
        return self._prompt_logprobs is not None

    def _output(self, sequence: Sequence) -> CompletionOutput:
        index = sequence.sample_idx
        output = self._deltas.get(index)
        if output is None:
            output = self._deltas[index] = CompletionOutput(
                index, num_draft_tokens=sequence.num_drafted, num_accepted_tokens=sequence.num_accepted
            )
        return output
