"""Converts the tokens of a step to the outputs of requests: texts, stop strings, beams, and ends of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.engine.outputs.beam_outputs import BeamTexts
from quire.engine.outputs.best_of import BestOf
from quire.engine.outputs.logprobs import FlatLogprobs, PromptLogprobs
from quire.engine.outputs.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.engine.outputs.text import SampleText
from quire.scheduling.edits import SequenceEvent
from quire.scheduling.plan import ItemResult, ScheduledSequence, TokenLogprobs
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Fail, Finish
from quire.text.tokenizer import Tokenizer


class ProcessedTokens(NamedTuple):
    """Result of the texts of a step's tokens.

    Args:
        num_generated: number of tokens that were added to outputs.
        stopped: sequences whose text reached a stop string, each with that string.
        failed: ids of requests whose own strategy failed, each with its error.
    """

    num_generated: int
    stopped: list[tuple[Sequence, str]]
    failed: list[tuple[str, str]]


class RequestState:
    """Collects the deltas of one request in a step.

    Args:
        request: the request.
        prompt: text of its prompt, None for a prompt of token ids.
        tokenizer: the tokenizer; None gives token ids only.
        metrics: times of the request, shared with every output.

    Attributes:
        beams: texts of the beams of a search; None for samples.
        pooled: result of a pooled request.
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
        self.pooled: tuple[float, ...] = ()
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
        is_last = sequence.finish_reason is not None and num_tokens == len(sequence.tokens)
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
            pooled=self.pooled,
            error=error,
            error_code=error_code,
            metrics=self.metrics,
        )

    @property
    def has_ended_sequence(self) -> bool:
        """True where a sequence with output since the last `take_output`, or the beam search, has ended."""
        if self.beams is not None:
            return self.beams.reason is not None
        return any(self.request.sequences[index].finish_reason is not None for index in self._deltas)

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


class OutputProcessor:
    """Keeps the texts and outputs of all unfinished requests.

    Args:
        tokenizer: None gives token ids only.
        clock: seconds, monotonic.

    Attributes:
        states: unfinished requests by id.
        updated: those with an output that has not been returned yet.
    """

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float]) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self.states: dict[str, RequestState] = {}
        self.updated: dict[str, RequestState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.states

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the unfinished requests."""
        return tuple(self.states)

    def add_request(self, request: Request, prompt: str | None, arrival_s: float) -> None:
        """Begin a request's outputs.

        Args:
            request: the request, with an id that no unfinished request has.
            prompt: text of its prompt, None where it came as token ids.
            arrival_s: time of its arrival, on the clock.
        """
        metrics = RequestMetrics(arrival_s=arrival_s)
        self.states[request.request_id] = RequestState(request, prompt, self._tokenizer, metrics)

    def mark_scheduled(self, request_id: str) -> bool:
        """Stamp a request that is part of a step; return True the first time."""
        metrics = self.states[request_id].metrics
        if metrics.first_scheduled_s is not None:
            return False
        metrics.first_scheduled_s = self._clock()
        return True

    def add_prompt_logprobs(self, sequence: Sequence, item: ScheduledSequence, result: ItemResult) -> None:
        """Take the log probabilities of the part of a prompt that an item computed."""
        state = self.states[sequence.request.request_id]
        if result.prompt_logprobs and state.wants_prompt_logprobs:
            state.add_prompt_logprobs(item.start, result.prompt_logprobs)

    def add_tokens(self, events: Iterable[SequenceEvent], results: Seq[ItemResult]) -> ProcessedTokens:
        """Take the tokens of a step, which the scheduler has appended to their sequences.

        Args:
            events: events of the sequences, in order, each with the index of the item's result.
            results: one for each item of the step.
        """
        states, updated = self.states, self.updated
        num_generated = 0
        stopped: dict[Sequence, str] = {}
        failed: dict[str, str] = {}
        for idx, sequence, edit, num_tokens in events:
            request_id = sequence.request.request_id
            if isinstance(edit, Fail):
                failed.setdefault(request_id, edit.error)
                continue
            if request_id in failed:
                continue
            state = updated[request_id] = states[request_id]
            if isinstance(edit, Finish):
                state.add_finish(sequence)
                state.pooled = results[idx].pooled
            elif sequence not in stopped:
                num_generated += 1
                result, draw_idx = results[idx], edit.draw_idx
                logprobs = result.logprobs[draw_idx] if result.logprobs else None
                stop = state.add_token(sequence, num_tokens, result.token_ids[draw_idx], logprobs)
                if stop is not None:
                    # Tokens of the same step after the stop string are no part of the output.
                    stopped[sequence] = stop
        ended = [(sequence, stop) for sequence, stop in stopped.items() if sequence.request.request_id not in failed]
        return ProcessedTokens(num_generated, ended, list(failed.items()))

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs of all requests with new tokens or an end; finished requests are forgotten."""
        updated, self.updated = self.updated, {}
        outputs: list[RequestOutput] = []
        now_s = self._clock()
        for request_id, state in updated.items():
            metrics = state.metrics
            if metrics.first_token_s is None:
                metrics.first_token_s = now_s
            # A request ends with a sequence that has new output.
            if state.has_ended_sequence and state.request.is_finished:
                metrics.finished_s = now_s
                del self.states[request_id]
            outputs.append(state.take_output(is_finished=metrics.finished_s is not None))
        return outputs

    def end_request(
        self, request_id: str, ended: Iterable[Sequence], error: str | None, error_code: str | None
    ) -> RequestOutput:
        """Return the last output of a request that ends early, and forget the request.

        Args:
            request_id: id of an unfinished request.
            ended: its sequences that were unfinished.
            error: error for the client, None for an abort.
            error_code: code of that error.
        """
        state = self.states.pop(request_id)
        self.updated.pop(request_id, None)
        for sequence in ended:
            state.add_finish(sequence)
        state.metrics.finished_s = self._clock()
        return state.take_output(is_finished=True, error=error, error_code=error_code)
