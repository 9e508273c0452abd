"""Converts the tokens of a step to the outputs of requests: texts, stop strings, beams, and ends of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from quire.engine.outputs.beam_outputs import BeamTexts, BestOf
from quire.engine.outputs.logprobs import FlatLogprobs, PromptLogprobs
from quire.engine.outputs.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.engine.outputs.text import SampleText
from quire.scheduling.edits import SequenceEvent
from quire.scheduling.plan import ItemResult, ScheduledSequence, TokenLogprobs
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Append, Fail, Finish
from quire.text.tokenizers.tokenizer import Tokenizer


class RequestState:
    """Collects the output of one request since the last `take_output`."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics,
        *,
        final_only: bool,
    ) -> None:
        params = request.params
        self.request = request
        self.metrics = metrics
        self.final_only = final_only
        needs_each = params.stop or params.measures_tokens or params.strategy or params.beam_width
        self.reads_late = not needs_each
        self.has_ended = False
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._samples: dict[int, SampleText] = {}
        self._cumulative: dict[int, float] = {}
        self._deltas: dict[int, CompletionOutput] = {}
        self._ranking = BestOf(params.n) if params.is_ranked else None
        self.beams = None if params.beam_width is None else BeamTexts(request, tokenizer)
        self.pooled: tuple[float, ...] = ()
        self._prompt_logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(FlatLogprobs(tokenizer))

    def add_token(self, sequence: Sequence, num_tokens: int, logprobs: TokenLogprobs | None) -> str | None:
        """Append a token to a sample, or with `reads_late` all unread tokens; return the stop string it reaches."""
        idx = sequence.sample_idx
        sample = self._samples.get(idx)
        if sample is None:
            sample = self._samples[idx] = SampleText(self.request, self._tokenizer)
        num_read = sequence.num_prompt + sample.num_output if self.reads_late else num_tokens - 1
        token_ids = sequence.tokens[num_read:num_tokens]
        if not token_ids:
            return None
        output = self._output(sequence)
        output.token_ids += token_ids
        if logprobs is not None:
            if self.request.params.logprobs is not None:
                if output.logprobs is None:
                    output.logprobs = FlatLogprobs(self._tokenizer)
                output.logprobs.append(logprobs)
            output.cumulative_logprob = self._cumulative[idx] = self._cumulative.get(idx, 0.0) + logprobs.logprob
        is_last = sequence.finish_reason is not None and num_tokens == len(sequence.tokens)
        is_end_token = is_last and sequence.finish_reason is FinishReason.STOP
        text, stop = sample.take(token_ids, num_tokens - sequence.num_prompt, is_end_token=is_end_token)
        output.text += text
        if stop is not None:
            self.has_ended = True
        elif is_last:
            output.text += sample.flush()
        return stop

    def add_finish(self, sequence: Sequence) -> None:
        """Record the end of a sample or of a beam search; emit text that was held back for a stop string."""
        self.has_ended = True
        if self.beams is not None:
            self.beams.reason = sequence.finish_reason
            return
        output = self._output(sequence)
        if not output.token_ids and sequence.sample_idx in self._samples:
            output.text += self._samples[sequence.sample_idx].flush()

    def add_prompt_logprobs(self, start: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Add the log probabilities of prompt positions from `start + 1` on; known ones are skipped."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.add(logprobs[len(self._prompt_logprobs) - start - 1 :])
            self.request.num_known_prompt_logprobs = len(self._prompt_logprobs) - 1

    def take_output(
        self, *, is_finished: bool, error: str | None = None, error_code: str | None = None
    ) -> RequestOutput:
        """Return the output since the last call."""
        if self.reads_late:
            for sequence in self.request.sequences:
                self.add_token(sequence, len(sequence.tokens), None)
        self.has_ended = False
        deltas, self._deltas = self._deltas, {}
        outputs, num_pruned = [deltas[index] for index in sorted(deltas)], 0
        for output in outputs:
            sequence = self.request.sequences[output.index]
            output.num_draft_tokens, output.num_accepted_tokens = sequence.num_drafted, sequence.num_accepted
            # A stop string ends a sequence after `add_token`, and overrides the length or a stop token.
            if sequence.finish_reason is not None:
                output.finish_reason, output.stop_reason = sequence.finish_reason.value, sequence.stop_reason
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

    def _output(self, sequence: Sequence) -> CompletionOutput:
        index = sequence.sample_idx
        output = self._deltas.get(index)
        if output is None:
            output = self._deltas[index] = CompletionOutput(index)
        return output


class OutputProcessor:
    """Keeps the texts and outputs of all unfinished requests.

    Args:
        tokenizer: the tokenizer; None gives token ids only.
        clock: seconds, monotonic.

    Attributes:
        states: unfinished requests by id.
        updated: unfinished requests with new tokens or an end since `take_outputs`.
    """

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float]) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self.states: dict[str, RequestState] = {}
        self.updated: dict[str, RequestState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.states

    def add_request(self, request: Request, prompt: str | None, arrival_s: float, *, final_only: bool = False) -> None:
        """Begin a request's outputs.

        Args:
            request: the request, with an id that no unfinished request has.
            prompt: text of its prompt; None if it came as token ids.
            arrival_s: time of its arrival, on the clock.
            final_only: see `Engine.add_request`.
        """
        metrics = RequestMetrics(arrival_s=arrival_s)
        state = RequestState(request, prompt, self._tokenizer, metrics, final_only=final_only)
        self.states[request.request_id] = state

    def mark_scheduled(self, request_id: str) -> None:
        """Stamp a request that is part of a step, the first time."""
        metrics = self.states[request_id].metrics
        if metrics.first_scheduled_s is None:
            metrics.first_scheduled_s = self._clock()

    def add_prompt_logprobs(self, sequence: Sequence, item: ScheduledSequence, result: ItemResult) -> None:
        """Add the log probabilities of the part of a prompt that an item computed."""
        self.states[sequence.request.request_id].add_prompt_logprobs(item.start, result.prompt_logprobs)

    def add_tokens(
        self, events: Iterable[SequenceEvent], results: Seq[ItemResult]
    ) -> tuple[int, list[tuple[Sequence, str]], list[tuple[str, str]]]:
        """Add the tokens of a step, which the scheduler has appended to their sequences, to the outputs.

        Args:
            events: events of the sequences, in order, each with the index of the item's result.
            results: one for each item of the step.

        Returns:
            The number of tokens that were added to outputs; (sequence, stop string) of the sequences whose text reached
            a stop string; (request id, error) of the requests whose strategy failed.
        """
        states, updated = self.states, self.updated
        num_generated = 0
        stopped: dict[Sequence, str] = {}
        failed: dict[str, str] = {}
        for idx, sequence, edit, num_tokens in events:
            request_id = sequence.request.request_id
            state = states[request_id]
            if state.reads_late and isinstance(edit, Append):
                num_generated += 1
                if not state.final_only or state.metrics.first_token_s is None:
                    updated[request_id] = state
                continue
            if isinstance(edit, Fail):
                failed.setdefault(request_id, edit.error)
                continue
            if request_id in failed:
                continue
            updated[request_id] = state
            if isinstance(edit, Finish):
                state.add_finish(sequence)
                state.pooled = results[idx].pooled
            elif sequence not in stopped:
                num_generated += 1
                measured = results[idx].logprobs
                stop = state.add_token(sequence, num_tokens, measured[edit.draw_idx] if measured else None)
                if stop is not None:
                    # Tokens of the same step after the stop string are no part of the output.
                    stopped[sequence] = stop
        ended = [(sequence, stop) for sequence, stop in stopped.items() if sequence.request.request_id not in failed]
        return num_generated, ended, list(failed.items())

    def take_outputs(
        self, may_hold: Callable[[], bool] | None = None, *, with_progress: bool = False
    ) -> list[RequestOutput]:
        """Return the outputs of all requests with new tokens or an end, and forget finished requests.

        Args:
            may_hold: see `Engine.step`.
            with_progress: True to include unfinished requests with `final_only`; else they have one output, at the end.
        """
        if with_progress:
            begun = {
                name: state for name, state in self.states.items() if state.final_only and state.metrics.first_token_s
            }
            self.updated |= begun
        updated = self.updated
        # The first output of a request, and one that ends a sample, are never held back.
        is_due = (state.has_ended or state.metrics.first_token_s is None for state in updated.values())
        if may_hold is not None and may_hold() and not any(is_due):
            return []
        self.updated = {}
        outputs: list[RequestOutput] = []
        now_s = self._clock()
        for request_id, state in updated.items():
            metrics = state.metrics
            if metrics.first_token_s is None:
                metrics.first_token_s = now_s
            if state.has_ended and state.request.is_finished:
                metrics.finished_s = now_s
                del self.states[request_id]
            elif state.final_only and not with_progress:
                continue
            outputs.append(state.take_output(is_finished=metrics.finished_s is not None))
        return outputs

    def remove(self, request_id: str) -> RequestState:
        """Forget a request that ends early, and return its state."""
        self.updated.pop(request_id, None)
        state = self.states.pop(request_id)
        state.metrics.finished_s = self._clock()
        return state
