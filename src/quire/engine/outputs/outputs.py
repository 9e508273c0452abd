"""Outputs of the engine: a `RequestOutput` per step for each request with new tokens, or one for the whole request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from quire.engine.outputs.logprobs import FlatLogprobs, PromptLogprobs
from quire.memory.results import TokenAccount
from quire.sequences.params import RequestOutputKind
from quire.text.tool_calls import ToolCall


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request.

    Args:
        index: index among the `n` samples; in a beam search, 0 is the best output.
        text: the output's text (in a delta: the new part).
        token_ids: the output's token ids (in a delta: the new ones).
        cumulative_logprob: sum over the output so far of the chosen tokens' log probabilities; None without `logprobs`
            and `best_of`.
        beam_score: score of a beam search: the sum of the log probabilities of the output's tokens, after penalties and
            other processing, divided by its length to the power of `length_penalty`.
        logprobs: a dictionary of `Logprob` by token id for each token of `token_ids`; None without `logprobs`.
        finish_reason: None while running; then "stop", "length", "abort" or "error"; "tool_calls" if a chat with tools
            ended by itself with calls that were not forced.
        stop_reason: the stop string or stop token id that ended the output; None for the model's own end token.
        num_draft_tokens: number of draft tokens that were verified for the output so far.
        num_accepted_tokens: number of draft tokens that were accepted.
        reasoning: reasoning text in a chat with a reasoning model; else None.
        content: text of the answer, outside calls, in a chat with a reasoning model or with tools; else None.
        tool_calls: calls in a chat with tools; the last is incomplete if the length or a stop string cut it off.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    beam_score: float | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """True once no more tokens will come."""
        return self.finish_reason is not None

    def copy(self) -> CompletionOutput:
        """Return a copy that later deltas do not change."""
        logprobs = None if self.logprobs is None else self.logprobs.copy()
        return replace(self, token_ids=self.token_ids.copy(), logprobs=logprobs)

    def add(self, delta: CompletionOutput) -> None:
        """Merge a later delta of the same sequence into this output."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if self.logprobs is None:
            self.logprobs = delta.logprobs
        elif delta.logprobs is not None:
            self.logprobs.extend(delta.logprobs)
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_draft_tokens = delta.num_draft_tokens
        self.num_accepted_tokens = delta.num_accepted_tokens
        self.beam_score = delta.beam_score


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of a monotonic clock, and what it has cost.

    Args:
        num_preemptions: number of times that one of its sequences was preempted.
        num_prompt_tokens: number of leading prompt tokens that were computed or found in the prefix cache so far.
    """

    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_prompt_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The output of one request, whole (`LLM.generate`) or as the delta of a step (streams; see `RequestOutputKind`).

    Args:
        request_id: the caller's or the engine's name for the request.
        prompt: the prompt's text (`LLM.chat`: the rendered conversation); None if it came as token ids.
        prompt_token_ids: the prompt's token ids; one list for all outputs of the request, not to be changed.
        outputs: whole: the sequences by index, all `n` unless the request failed before it forked, or a beam search
            found fewer. Delta: only the sequences with new tokens or an end; in a beam search, and if `best_of` exceeds
            `n`, none before the last delta.
        finished: True in the last output of the request.
        prompt_logprobs: log probabilities of the prompt's tokens, None for the first one; only in the first delta.
        num_cached_tokens: number of prompt tokens that came from the prefix cache (first admission).
        num_disk_tokens: number of cached tokens whose blocks were loaded from disk.
        cache_hit_end: reason for the end of the prefix hit, in words; None until the request was admitted.
        cache_differs_at: position of the prompt's first token that differs from a cached block after the hit; None if
            there is no such block, or the hit ended for another reason.
        prompt_account: the prompt's tokens by source, and computed ones by reason; None until it was admitted.
        num_pruned_tokens: number of tokens of samples that `best_of` left out, or of beams that a search dropped; in
            the last output.
        pooled: result of a pooled request, in the last output; see `Pooling`.
        kv_transfer_params: address at which another engine finds the prompt's blocks, in the last output of a request
            with `do_remote_decode`; else None.
        error: error of the request when a sequence's `finish_reason` is "error".
        error_code: code of the error: "request_failed" if the request is the cause, "kv_load_failed" if blocks that it
            requires from another engine are missing, else "engine_failed".
        metrics: times and preemptions.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0
    cache_hit_end: str | None = None
    cache_differs_at: int | None = None
    prompt_account: TokenAccount | None = None
    num_pruned_tokens: int = 0
    pooled: tuple[float, ...] = ()
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None
    error_code: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def add(self, delta: RequestOutput) -> None:
        """Merge a later delta of the same request into this output."""
        by_index = {output.index: output for output in self.outputs}
        for output in delta.outputs:
            sample = by_index.get(output.index)
            if sample is None:
                self.outputs.append(output)
            else:
                sample.add(output)
        self.outputs.sort(key=lambda output: output.index)
        self.finished = delta.finished
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.num_cached_tokens = delta.num_cached_tokens
        self.num_disk_tokens = delta.num_disk_tokens
        self.cache_hit_end = delta.cache_hit_end
        self.cache_differs_at = delta.cache_differs_at
        self.prompt_account = delta.prompt_account
        self.num_pruned_tokens = delta.num_pruned_tokens
        self.pooled = self.pooled or delta.pooled
        self.kv_transfer_params = self.kv_transfer_params or delta.kv_transfer_params
        self.error = self.error or delta.error
        self.error_code = self.error_code or delta.error_code
        self.metrics = delta.metrics


class OutputCollector:
    """Converts the deltas of one request to the kind of outputs that the caller chose."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._whole: RequestOutput | None = None

    def add(self, delta: RequestOutput) -> RequestOutput | None:
        """Add a delta; return the output to yield, or None."""
        if self._kind is RequestOutputKind.DELTA:
            return delta
        if self._whole is None:
            self._whole = delta
        else:
            self._whole.add(delta)
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self._whole if delta.finished else None
        return replace(self._whole, outputs=[output.copy() for output in self._whole.outputs])
