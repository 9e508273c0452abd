"""Converts the tokens of a step to the outputs of requests: texts, stop strings, beams, and ends of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.engine.outputs.beam_outputs import BeamTexts
from quire.engine.outputs.outputs import RequestMetrics, RequestOutput
from quire.engine.outputs.request_state import RequestState
from quire.scheduling.plan import Candidate, ItemResult, ScheduledSequence
from quire.scheduling.scheduler import SequenceEvent
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Append, Fail, Finish
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


class OutputProcessor:
    """Keeps the texts and outputs of all unfinished requests.

    Args:
        tokenizer: None gives token ids only.
        clock: seconds, monotonic.
    """

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float]) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        # Requests with an output that has not been returned yet.
        self._updated: dict[str, RequestState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the unfinished requests."""
        return tuple(self._states)

    def add_request(self, request: Request, prompt: str | None, arrival_s: float) -> None:
        """Begin a request's outputs.

        Args:
            request: the request, with an id that no unfinished request has.
            prompt: text of its prompt, None where it came as token ids.
            arrival_s: time of its arrival, on the clock.
        """
        metrics = RequestMetrics(arrival_s=arrival_s)
        self._states[request.request_id] = RequestState(request, prompt, self._tokenizer, metrics)

    def mark_scheduled(self, request_id: str) -> bool:
        """Stamp a request that is part of a step; return True the first time."""
        metrics = self._states[request_id].metrics
        if metrics.first_scheduled_s is not None:
            return False
        metrics.first_scheduled_s = self._clock()
        return True

    def add_prompt_logprobs(self, sequence: Sequence, item: ScheduledSequence, result: ItemResult) -> None:
        """Take the log probabilities of the part of a prompt that an item computed."""
        state = self._states[sequence.request.request_id]
        if result.prompt_logprobs and state.wants_prompt_logprobs:
            state.add_prompt_logprobs(item.start, result.prompt_logprobs)

    def add_tokens(self, events: Iterable[SequenceEvent], results: Seq[ItemResult]) -> ProcessedTokens:
        """Take the tokens of a step, which the scheduler has appended to their sequences.

        Args:
            events: events of the sequences, in order, each with the index of the item's result.
            results: one for each item of the step.
        """
        states, updated = self._states, self._updated
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

    def find_beam_stops(
        self, groups: Iterable[Seq[Sequence]], candidates: Iterable[tuple[Candidate, ...]]
    ) -> list[tuple[Candidate, ...]]:
        """Return the candidates of beam groups, each with the stop string that its text reaches, if any.

        Args:
            groups: the beams of each group; empty where the request has ended.
            candidates: the candidates of each group.
        """
        return [
            self._beam_texts(beams[0]).find_stops(beams, found) if beams else found
            for beams, found in zip(groups, candidates, strict=True)
        ]

    def add_beam_tokens(self, events: Iterable[SequenceEvent]) -> tuple[int, list[str]]:
        """Take the candidates that became beams.

        Args:
            events: events of the beams of a step, in order.

        Returns:
            Number of tokens that beams were given, and the ids of the requests whose search ended without a hypothesis.
        """
        num_chosen = 0
        ended: dict[str, RequestState] = {}
        for _, sequence, edit, _ in events:
            request_id = sequence.request.request_id
            state = self._states[request_id]
            if isinstance(edit, Append):
                num_chosen += 1
                self._beam_texts(sequence).choose(edit.sample_idx, edit.draw_idx)
                if state.metrics.first_token_s is None:
                    state.metrics.first_token_s = self._clock()
            else:
                state.add_finish(sequence)
                ended[request_id] = state
        exhausted = [name for name, state in ended.items() if state.beams and state.beams.reason is FinishReason.ERROR]
        self._updated |= {name: state for name, state in ended.items() if name not in exhausted}
        return num_chosen, exhausted

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs of all requests with new tokens or an end; finished requests are forgotten."""
        updated, self._updated = self._updated, {}
        outputs: list[RequestOutput] = []
        now_s = self._clock()
        for request_id, state in updated.items():
            is_finished = state.request.is_finished
            if state.metrics.first_token_s is None:
                state.metrics.first_token_s = now_s
            if is_finished:
                state.metrics.finished_s = now_s
                del self._states[request_id]
            outputs.append(state.take_output(is_finished=is_finished))
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
        state = self._states.pop(request_id)
        self._updated.pop(request_id, None)
        for sequence in ended:
            state.add_finish(sequence)
        state.metrics.finished_s = self._clock()
        return state.take_output(is_finished=True, error=error, error_code=error_code)

    def _beam_texts(self, beam: Sequence) -> BeamTexts:
        texts = self._states[beam.request.request_id].beams
        assert texts is not None, "a beam of a request without a search"
        return texts
