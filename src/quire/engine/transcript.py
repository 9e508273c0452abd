"""From tokens to what a client reads: text, log probabilities and finish reasons of one request."""

from __future__ import annotations

from quire.decoding.stop import StopStrings
from quire.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from quire.engine.ranking import Ranking
from quire.scheduling.plan import TokenLogprobs
from quire.sequences.request import Request
from quire.sequences.sequence import FinishReason, Sequence
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer


class SampleTranscript:
    """One sample's text as far as it may be shown; bytes of a character that its end cuts off are left out.

    Args:
        request: the sample's request.
        tokenizer: None gives token ids only.
    """

    __slots__ = ("_cumulative", "_detokenizer", "_shows_stop", "_stops")

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self._stops = StopStrings(params.stop, is_included=params.include_stop_str_in_output)
        self._shows_stop = params.include_stop_str_in_output
        self._cumulative = 0.0
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                kept_special_ids=params.kept_special_ids,
            )

    def take(self, sequence: Sequence, num_tokens: int, token_id: int) -> tuple[str, str | None]:
        """Take one more token.

        Args:
            sequence: as it is after the step that gave the token, and maybe further ones.
            num_tokens: prompt and output up to this token.
            token_id: the token.

        Returns:
            The text that may be shown now, and the stop string that it completed, if any.
        """
        if self._detokenizer is None:
            return "", None
        is_last = sequence.is_finished and num_tokens == len(sequence.tokens)
        is_stop_token = is_last and sequence.finish_reason is FinishReason.STOP
        text = "" if is_stop_token and not self._shows_stop else self._detokenizer.push((token_id,))
        num_output = num_tokens - sequence.num_prompt
        shown, stop = self._stops.push(text, can_stop=num_output > sequence.request.params.min_tokens)
        if stop is None and is_last:
            shown += self._stops.flush()
        return shown, stop

    def flush(self) -> str:
        """Return the text still held back, of a sample that ended without another token."""
        return self._stops.flush()

    def add_logprob(self, logprob: float) -> float:
        """Add a chosen token's log probability and return the sum so far."""
        self._cumulative += logprob
        return self._cumulative


class RequestTranscript:
    """Collects the news of one request in a step.

    Args:
        request: the request.
        prompt: its text, None where it came as token ids.
        tokenizer: None gives token ids only.
        metrics: times of the request, shared with every output.
    """

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, metrics: RequestMetrics
    ) -> None:
        self.request = request
        self.metrics = metrics
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._samples: dict[int, SampleTranscript] = {}
        self._news: dict[int, CompletionOutput] = {}
        self._ranking = Ranking(request.params.n) if request.params.is_ranked else None
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    def add_token(
        self, sequence: Sequence, num_tokens: int, token_id: int, logprobs: TokenLogprobs | None
    ) -> str | None:
        """Take a token of one of the samples; see `SampleTranscript.take`.

        Returns:
            The stop string that its text completed, if any.
        """
        sample = self._samples.get(sequence.sample_idx)
        if sample is None:
            sample = self._samples[sequence.sample_idx] = SampleTranscript(self.request, self._tokenizer)
        output = self._output(sequence)
        output.token_ids.append(token_id)
        if logprobs is not None:
            if self.request.params.logprobs is not None:
                if output.logprobs is None:
                    output.logprobs = []
                output.logprobs.append(self._position(logprobs))
            output.cumulative_logprob = sample.add_logprob(logprobs.logprob)
        text, stop = sample.take(sequence, num_tokens, token_id)
        output.text += text
        return stop

    def add_finish(self, sequence: Sequence) -> None:
        """Note that a sample has ended."""
        output = self._output(sequence)
        if output.finish_reason is None and not output.token_ids and sequence.sample_idx in self._samples:
            output.text += self._samples[sequence.sample_idx].flush()
        assert sequence.finish_reason is not None
        output.finish_reason = sequence.finish_reason.value
        output.stop_reason = sequence.stop_reason

    def add_prompt_logprobs(self, start: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Take the log probabilities of prompt positions from `start + 1` on; known ones are skipped."""
        assert self._prompt_logprobs is not None
        new = logprobs[len(self._prompt_logprobs) - start - 1 :]
        self._prompt_logprobs += [self._position(position) for position in new]
        self.request.num_known_prompt_logprobs = len(self._prompt_logprobs) - 1

    def take_news(self, *, is_finished: bool, error: str | None = None) -> RequestOutput:
        """Hand over what happened since the last call."""
        news, self._news = self._news, {}
        outputs, num_dropped = list(news.values()), 0
        if self._ranking is not None:
            self._ranking.add(outputs)
            outputs, num_dropped = self._ranking.best() if is_finished else ([], 0)
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
            num_dropped_tokens=num_dropped,
            error=error,
            metrics=self.metrics,
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while log probabilities of the prompt are missing."""
        return self._prompt_logprobs is not None

    def _output(self, sequence: Sequence) -> CompletionOutput:
        index = sequence.sample_idx
        output = self._news.get(index)
        if output is None:
            output = self._news[index] = CompletionOutput(
                index, num_draft_tokens=sequence.num_drafted, num_accepted_tokens=sequence.num_accepted
            )
        return output

    def _position(self, logprobs: TokenLogprobs) -> PositionLogprobs:
        """Return one position's log probabilities, the chosen token first."""
        position = {logprobs.token_id: self._logprob(logprobs.token_id, logprobs.logprob, logprobs.rank)}
        for rank, (token_id, value) in enumerate(logprobs.top, 1):
            if token_id != logprobs.token_id:
                position[token_id] = self._logprob(token_id, value, rank)
        return position

    def _logprob(self, token_id: int, value: float, rank: int) -> Logprob:
        if self._tokenizer is None:
            return Logprob(value, rank)
        data = self._tokenizer.token_bytes(token_id)
        return Logprob(value, rank, data.decode("utf-8", "replace"), data)
